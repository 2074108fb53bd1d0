// What the page knows: snapshots of the router merged into one picture, bounded like the router's own.

const SAMPLES = 300;
const REQUESTS = 200;
const EVENTS = 100;

export class Store {
  constructor() {
    this.mine = new Set(); // ids of requests that this page has made
    this.reset("");
  }

  reset(epoch) {
    this.epoch = epoch;
    this.rev = 0;
    this.now = 0;
    this.totals = { requests: 0, tokens: 0, moves: 0, preemptions: 0, handovers: 0 };
    this.instances = [];
    this.ledgers = new Map();
    this.fleet = [];
    this.events = [];
    this.requests = new Map();
  }

  /** How much of the past is worth drawing: what there is, within one and five minutes. */
  get span() {
    const first = this.fleet.length ? this.fleet[0][0] : this.now;
    return Math.min(Math.max(this.now - first, 60e6), SAMPLES * 1e6);
  }

  get query() {
    return new URLSearchParams({ since: this.rev, epoch: this.epoch });
  }

  merge(snapshot) {
    if (snapshot.epoch !== this.epoch) this.reset(snapshot.epoch);
    if (snapshot.rev < this.rev) return; // an answer that was overtaken
    Object.assign(this, { rev: snapshot.rev, now: snapshot.now_us, totals: snapshot.totals, instances: snapshot.instances });
    const known = new Set(Object.keys(snapshot.ledgers));
    for (const name of this.ledgers.keys()) if (!known.has(name)) this.ledgers.delete(name);
    for (const [name, rows] of Object.entries(snapshot.ledgers)) {
      this.ledgers.set(name, [...(this.ledgers.get(name) ?? []), ...rows].slice(-SAMPLES));
    }
    this.fleet = [...this.fleet, ...snapshot.fleet].slice(-SAMPLES);
    this.events = [...this.events, ...snapshot.events].slice(-EVENTS);
    for (const request of snapshot.requests) {
      this.requests.delete(request.body);
      this.requests.set(request.body, request);
    }
    this.#forget();
  }

  #forget() {
    if (this.requests.size <= REQUESTS) return;
    const oldest = [...this.requests.values()].sort((a, b) => a.began_us - b.began_us);
    for (const request of oldest.slice(0, -REQUESTS)) this.requests.delete(request.body);
  }

  request(id) {
    for (const request of this.requests.values()) if (request.id === id) return request;
    return null;
  }

  instance(name) {
    return this.instances.find((instance) => instance.name === name) ?? null;
  }
}
