// One card an instance: who it is, what it does now, its blocks now and over time.

import { stackedArea } from "./charts.js";
import { byId, keyed, make, setText } from "./dom.js";
import { ago, BLOCKS, count, percent, STACK, whole } from "./words.js";

export class Cards {
  constructor() {
    this.parts = new WeakMap();
    this.empty = make("p", { class: "panel empty" }, "No instance has joined yet.");
    byId("cards").before(this.empty);
  }

  /** `serving`: the name of the instance that answers this page's chat now. */
  render(store, serving) {
    this.empty.hidden = store.instances.length > 0;
    setText(byId("fleet-line"), fleetLine(store.instances.filter((instance) => instance.state !== "gone")));
    const create = (instance) => this.#create(instance);
    const update = (card, instance) => this.#update(card, instance, store, serving);
    keyed(byId("cards"), store.instances, (instance) => instance.name, create, update);
  }

  #create(instance) {
    const role = make("span", { class: "role" });
    const stateText = make("span");
    const state = make("span", { class: "state" }, make("span", { class: "dot", "aria-hidden": "true" }), stateText);
    const facts = Object.fromEntries(
      ["Running", "Waiting", "Prefix hits", "Preempted", "Hand-overs", "Restarts", "In host memory"].map((name) => [name, make("dd")]),
    );
    const list = make("dl", { class: "facts" });
    for (const [name, value] of Object.entries(facts)) list.append(make("div", {}, make("dt", {}, name), value));
    const bar = makeBar();
    const area = stackedArea();
    const from = make("span");
    const foot = make("div", { class: "area-foot", "aria-hidden": "true" }, from, make("span", {}, "now"));
    const head = make("div", { class: "card-head" }, make("h3", {}, instance.name), role, state);
    const card = make("article", { class: "card" }, head, list, bar.element, make("div", { class: "area-box" }, area.svg, foot));
    this.parts.set(card, { role, state, stateText, facts, bar, area, from });
    return card;
  }

  #update(card, instance, store, serving) {
    const { role, state, stateText, facts, bar, area, from } = this.parts.get(card);
    const gone = instance.state === "gone";
    card.className = `card${gone ? " is-gone" : ""}${instance.name === serving ? " serves-me" : ""}`;
    setText(role, instance.role);
    state.className = `state state-${instance.state}`;
    const serves = instance.name === serving ? "serves you · " : "";
    setText(stateText, gone ? `gone, ${ago(store.now - instance.seen_us)}` : `${serves}${instance.state}`);
    const lives = `life ${instance.lives} that this router has seen`;
    state.dataset.tip = `process ${instance.pid}, ${lives}\nincarnation ${instance.incarnation}`;
    facts.Running.replaceChildren(gone ? "–" : whole(instance.running), make("small", {}, ` of ${whole(instance.slots)} slots`));
    setText(facts.Waiting, gone ? "–" : whole(instance.waiting));
    setText(facts["Prefix hits"], percent(instance.prefix_hits, instance.prefix_queries));
    setText(facts.Preempted, whole(instance.preemptions));
    setText(facts["Hand-overs"], whole(instance.handovers));
    setText(facts.Restarts, whole(instance.lives - 1));
    const host = facts["In host memory"];
    host.parentElement.hidden = instance.host_blocks === 0;
    host.replaceChildren(whole(instance.host_used), make("small", {}, ` of ${whole(instance.host_blocks)} blocks`));
    bar.update(instance);
    const label = `Blocks of ${instance.name} over the last five minutes; now ${inWords(instance.ledger)}`;
    setText(from, ago(store.span));
    area.update(store.ledgers.get(instance.name) ?? [], store, instance.blocks, label);
  }
}

function fleetLine(here) {
  const sum = (name) => here.reduce((total, instance) => total + instance[name], 0);
  return here.length ? `${count(sum("slots"), "slot")}, ${count(sum("blocks"), "KV block")}, ${count(sum("open"), "choice")} open` : "";
}

const inWords = (ledger) => STACK.map((column) => `${ledger[column]} ${BLOCKS[column][1]}`).join(", ");

function makeBar() {
  const share = make("span");
  const bar = make("div", { class: "bar", "aria-hidden": "true" });
  const counts = make("ul", { class: "counts" });
  const parts = STACK.map((column) => {
    const [state, name, meaning] = BLOCKS[column];
    const piece = make("span", { class: `b-${state}` });
    const number = make("b");
    bar.append(piece);
    const swatch = make("span", { class: `swatch b-${state}`, "aria-hidden": "true" });
    counts.append(make("li", { "data-tip": meaning }, swatch, number, ` ${name}`));
    return { column, piece, number };
  });
  const head = make("div", { class: "bar-head" }, make("span", {}, "KV blocks"), share);
  const update = ({ ledger, blocks }) => {
    const held = ledger[2] + ledger[3] + ledger[4] + ledger[5];
    setText(share, `${percent(held, blocks)} of ${whole(blocks)} held`);
    for (const { column, piece, number } of parts) {
      piece.hidden = ledger[column] === 0;
      piece.style.flexBasis = `${(100 * ledger[column]) / Math.max(blocks, 1)}%`;
      setText(number, whole(ledger[column]));
    }
  };
  return { element: make("div", {}, head, bar, counts), update };
}
