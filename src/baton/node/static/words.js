// How numbers, times and stages are said, in one place.

export const BLOCKS = [
  // in the order of a sample, with what they mean
  ["free", "free", "holds nothing"],
  ["evictable", "evictable", "a cached prefix that nobody uses now"],
  ["used", "in use", "of running requests"],
  ["leased", "leased", "kept for a hand-over until the other side has it"],
  ["receiving", "receiving", "KV of a hand-over, or from host memory, is arriving"],
  ["leaving", "leaving", "being copied to host memory"],
];
export const STACK = [2, 3, 4, 5, 1, 0]; // from the bottom: what is held first, free last

export const STAGES = {
  queued: { look: "queued", name: "queued" },
  placed: { look: "queued", name: "waits at its instance" },
  prefill: { look: "prefill", name: "prefill" },
  handover: { look: "handover", name: "prefill elsewhere, hand-over", mark: true },
  restore: { look: "prefill", name: "restored from host memory" },
  decode: { look: "decode", name: "decode" },
  preempted: { look: "preempted", name: "preempted", mark: true },
  resumed: { look: "queued", name: "taken over", mark: true },
  moved: { look: "moved", name: "moving", mark: true },
};
export const stageOf = (name) => STAGES[name] ?? { look: "queued", name };

export function duration(us) {
  if (us === null || us === undefined) return "–";
  const ms = us / 1000;
  if (ms < 10) return `${ms.toFixed(1)} ms`;
  if (ms < 1000) return `${Math.round(ms)} ms`;
  if (ms < 10_000) return `${(ms / 1000).toFixed(2)} s`;
  if (ms < 120_000) return `${(ms / 1000).toFixed(1)} s`;
  return `${Math.floor(ms / 60_000)} min ${Math.round((ms % 60_000) / 1000)} s`;
}

export function ago(us) {
  const s = Math.max(0, us / 1e6);
  if (s < 1.5) return "now";
  if (s < 100) return `${Math.round(s)} s ago`;
  if (s < 5400) return `${Math.round(s / 60)} min ago`;
  return `${Math.round(s / 3600)} h ago`;
}

export const whole = (number) => number.toLocaleString("en-GB");
export const percent = (part, all) => (all > 0 ? `${Math.round((100 * part) / all)} %` : "–");
export const count = (number, one, many = `${one}s`) => `${whole(number)} ${number === 1 ? one : many}`;

const FINE = new Set(["stop", "length"]);

/** How a lane stands, in words: [class of it, text]. */
export function standing(lane) {
  if (lane.ended_us === null) return ["open", currentStage(lane)];
  if (FINE.has(lane.finish)) return ["done", `ended (${lane.finish})`];
  if (lane.finish === "abort") return ["done", "taken back by its client"];
  return ["failed", `failed: ${lane.finish || "no reason given"}`];
}

function currentStage(lane) {
  const last = lane.segments.at(-1);
  if (!last) return "arrived";
  const [stage, where] = last;
  const name = stageOf(stage).name;
  return where && stage !== "placed" ? `${name}, ${where}` : name;
}

/** [{from, to, tokens, at, why, index}] of a lane; `to` is null while it looks for a place. */
export function movesOf(lane) {
  const moves = [];
  let place = "";
  let left = null; // why and when it left its place, if it has
  lane.segments.forEach(([stage, where, at, , tokens, why], index) => {
    if (stage === "moved" || stage === "preempted") left = { from: where || place, to: null, tokens, at, why, index };
    if (stage === "placed") {
      if (place) moves.push({ ...(left ?? { from: place, tokens, at, why, index }), to: where });
      left = null;
    }
    if (stage === "placed" || stage === "resumed") place = where;
    else if (left?.from === where && stage !== "moved" && stage !== "preempted") left = null; // it went on where it was
  });
  if (left && lane.segments[left.index][0] === "moved") moves.push(left);
  return moves;
}

export function moveText(move) {
  const after = move.tokens ? `after ${count(move.tokens, "token")}` : "before its first token";
  if (move.to === move.from) return `went on at ${move.to} ${after}`;
  return move.to ? `moved from ${move.from} to ${move.to} ${after}` : `left ${move.from} ${after}, looking for a place`;
}

/** Who prefilled what was handed over in a segment, where that is known. */
export const giverOf = ([stage, , , , , why]) => (stage === "handover" ? (why.match(/^from (.+)$/)?.[1] ?? "") : "");

/** Where a lane is served now, or was last. */
export function placeOf(lane) {
  return lane.segments.findLast(([stage]) => stage === "placed" || stage === "resumed")?.[1] ?? "";
}
