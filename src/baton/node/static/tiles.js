// The row of figures at the top, each with its last minutes.

import { server } from "./api.js";
import { sparkline } from "./charts.js";
import { byId, make, setText } from "./dom.js";
import { ago, count, duration, movesOf, whole } from "./words.js";

// columns of a row of the fleet
const [WAITING, OPEN, TOKENS, TTFT50, TTFT95, TPOT50, TPOT95, MOVES] = [1, 2, 3, 4, 5, 6, 7, 8];

const TILES = [
  { title: "Open requests", values: (row) => row[OPEN], say: (row) => [whole(row[OPEN]), ""], beside: instancesLine },
  { title: "Queue", values: (row) => row[WAITING] + row.queued, say: queue, beside: queueLine },
  { title: "Throughput", values: (row) => row[TOKENS], say: (row) => [whole(row[TOKENS]), "tokens/s"], beside: totalLine },
  timeTile("Time to first token", TTFT50, TTFT95),
  timeTile("Time per token", TPOT50, TPOT95),
  ...(server === "router" ? [{ title: "Moves", values: (row) => row[MOVES], say: moves, beside: (_, store) => between(lastMove(store)) }] : []),
];

function timeTile(title, median, high) {
  const split = (us) => (us === null ? ["–", ""] : duration(us).split(" "));
  return {
    title,
    values: (row) => row[median],
    others: (row) => row[high],
    say: (row) => split(row[median]),
    beside: (row) => (row[high] === null ? "nothing measured lately" : `median · p95 ${duration(row[high])}`),
  };
}

function queue(row) {
  return [whole(row[WAITING] + row.queued), ""];
}

function queueLine(row) {
  return server === "router" ? `${whole(row[WAITING])} in router, ${whole(row.queued)} at instances` : "";
}

function instancesLine(_, store) {
  const ready = store.instances.filter((instance) => instance.state === "ready").length;
  return `${ready} of ${count(store.instances.length, "instance")} ready`;
}

function totalLine(_, store) {
  return `${whole(store.totals.tokens)} in ${count(store.totals.requests, "request")}`;
}

function moves(_, store) {
  const last = lastMove(store);
  return [whole(store.totals.moves), last ? `last ${ago(store.now - last.at)}` : ""];
}

const between = (move) => (move ? `${move.from} → ${move.to ?? "…"}` : "none lately");

function lastMove(store) {
  let last = null;
  for (const request of store.requests.values()) {
    for (const lane of request.lanes) {
      for (const move of movesOf(lane)) if (!last || move.at > last.at) last = move;
    }
  }
  return last;
}

export class Tiles {
  constructor() {
    this.tiles = TILES.map((tile) => {
      const figure = make("span");
      const unit = make("span", { class: "unit" });
      const beside = make("p", { class: "beside" });
      const spark = sparkline();
      const head = make("p", { class: "figure" }, figure, unit);
      byId("tiles").append(make("div", { class: "tile" }, make("h2", {}, tile.title), head, beside, spark.svg));
      return { ...tile, figure, unit, besideLine: beside, spark };
    });
  }

  render(store) {
    if (!store.fleet.length) return;
    const rows = withQueues(store);
    const last = rows.at(-1);
    for (const tile of this.tiles) {
      const [figure, unit] = tile.say(last, store);
      setText(tile.figure, figure);
      setText(tile.unit, unit);
      setText(tile.besideLine, tile.beside(last, store));
      tile.spark.update(rows, store, tile.values, tile.others);
    }
  }
}

/** Rows of the fleet, each with what waits at instances in `queued`. Samples of one second carry the same time. */
function withQueues(store) {
  const queued = new Map();
  for (const rows of store.ledgers.values()) {
    for (const row of rows) queued.set(row[0], (queued.get(row[0]) ?? 0) + row[8]);
  }
  return store.fleet.map((row) => Object.assign([...row], { queued: queued.get(row[0]) ?? 0 }));
}
