// Recent requests as lanes: a coloured piece for each stage, a mark wherever a request was handed over, preempted or moved.

import { byId, icon, keyed, make, setText } from "./dom.js";
import { refreshTip } from "./tip.js";
import { ago, count, duration, giverOf, moveText, movesOf, stageOf, standing } from "./words.js";

const LEGEND = [
  // [look of its piece, its mark, name]
  ["queued", null, "queued"],
  ["prefill", null, "prefill"],
  ["handover", "handover", "hand-over"],
  ["decode", null, "decode"],
  ["preempted", "preempted", "preempted"],
  [null, "resumed", "taken over"],
  ["moved", "moved", "moved"],
  [null, "failed", "failed"],
];
const ABOVE = ["handover", "resumed", "preempted", "moved", "failed"]; // where marks meet, later ones are on top
const TICKS = 6;
const LABEL_PX = 7; // of one character; a label is shown only where it fits

export class Timeline {
  constructor(openDetail) {
    this.openDetail = openDetail;
    for (const [look, mark, name] of LEGEND) {
      const swatch = look ? make("span", { class: `swatch s-${look}`, "aria-hidden": "true" }) : "";
      byId("stage-legend").append(make("li", {}, swatch, mark ? icon(mark) : "", name));
    }
  }

  render(store) {
    const span = Number(byId("span").value) * 1e6;
    const shown = chosen(store, byId("filter").value, span);
    this.#axis(span);
    byId("no-lanes").hidden = shown.length > 0;
    const width = Math.max(byId("axis").clientWidth, 1);
    const view = { start: store.now - span, span, now: store.now, width, mine: store.mine };
    keyed(byId("lanes"), shown, (request) => request.body, (request) => this.#create(request), (row, request) => update(row, request, view));
    refreshTip();
  }

  #axis(span) {
    const labels = Array.from({ length: TICKS + 1 }, (_, i) => (i === TICKS ? "now" : `−${Math.round(((TICKS - i) * span) / TICKS / 1e6)} s`));
    keyed(byId("axis"), labels.map((text, i) => ({ text, i })), ({ i }) => i, () => make("span"), (element, { text, i }) => {
      setText(element, text);
      element.style.left = `${(100 * i) / TICKS}%`;
    });
  }

  #create(request) {
    const label = make("span", { class: "lane-label" }, make("span", { class: "id" }, shortId(request)), make("span", { class: "many" }));
    const button = make("button", { type: "button", class: "lane" }, label, make("span", { class: "tracks" }));
    button.addEventListener("click", () => this.openDetail(request.body));
    return make("li", {}, button);
  }
}

export function shortId(request) {
  const id = request.id || `#${request.body}`;
  return id.length > 14 ? `${id.slice(0, 13)}…` : id;
}

function chosen(store, filter, span) {
  const since = store.now - span;
  const passes = {
    all: () => true,
    mine: (request) => store.mine.has(request.id),
    disturbed: (request) => request.lanes.some((lane) => lane.segments.some(([stage]) => stage === "moved" || stage === "preempted")),
  }[filter];
  return [...store.requests.values()]
    .filter((request) => endOf(request) >= since && passes(request))
    .sort((a, b) => b.began_us - a.began_us || b.body - a.body);
}

const endOf = (request) => (request.lanes.some((lane) => lane.ended_us === null) ? Infinity : Math.max(...request.lanes.map((lane) => lane.ended_us)));

function update(row, request, view) {
  const button = row.firstElementChild;
  const [label, tracks] = button.children;
  const tokens = request.lanes.reduce((sum, lane) => sum + lane.tokens, 0);
  setText(label.lastElementChild, `${request.choices > 1 ? `${request.choices} × ` : ""}${count(tokens, "token")}`);
  button.classList.toggle("mine", view.mine.has(request.id));
  const text = summary(request, view.now);
  button.dataset.tip = text;
  button.setAttribute("aria-label", `${text.replaceAll("\n", ", ")}. Details`);
  tracks.replaceChildren(...request.lanes.map((lane) => track(lane, view)));
}

function summary(request, now) {
  const lines = [`Request ${request.id || request.body}, asked ${ago(now - request.began_us)}`];
  for (const lane of request.lanes) {
    lines.push(`${standing(lane)[1]}, ${count(lane.tokens, "token")}`, ...movesOf(lane).map(moveText));
  }
  return lines.join("\n");
}

function track(lane, view) {
  const element = make("span", { class: "track" });
  const marks = [];
  lane.segments.forEach((segment, i) => {
    const [stage, , start, end] = segment;
    const stop = end ?? view.now;
    if (stop < view.start) return;
    element.append(piece(segment, stop, view));
    if (stageOf(stage).mark && start >= view.start) marks.push(mark(stage, start, noteText(lane, segment, i), view));
  });
  if (standing(lane)[0] === "failed" && lane.ended_us >= view.start) marks.push(mark("failed", lane.ended_us, standing(lane)[1], view));
  // Taken over right after it left: the mark of the move says it all.
  const crowded = (mark, i) => mark.dataset.mark === "resumed" && i > 0 && mark.at - marks[i - 1].at < (14 * view.span) / view.width;
  const kept = marks.filter((mark, i) => !crowded(mark, i));
  kept.sort((a, b) => ABOVE.indexOf(a.dataset.mark) - ABOVE.indexOf(b.dataset.mark));
  element.append(...kept);
  return element;
}

function piece(segment, stop, view) {
  const [stage, where, start, end, , why] = segment;
  const { look, name } = stageOf(stage);
  const label = stage === "moved" ? "" : [giverOf(segment), where].filter(Boolean).join(" → ");
  const left = Math.max(0, (start - view.start) / view.span);
  const share = Math.max(0, (stop - view.start) / view.span - left);
  const fits = label && share * view.width > label.length * LABEL_PX + 14;
  const element = make("span", { class: `seg s-${look}${end === null ? " open" : ""}` }, fits ? label : "");
  element.style.left = `${100 * left}%`;
  element.style.width = `${100 * share}%`;
  if (!fits) element.style.padding = "0";
  const place = where ? ` ${stage === "moved" ? "away from" : "on"} ${where}` : "";
  element.dataset.tip = `${name}${place}, ${duration(stop - start)}${end === null ? " so far" : ""}${why ? `\n${why}` : ""}`;
  return element;
}

function noteText(lane, [stage, where, , , tokens, why], index) {
  const move = movesOf(lane).find((one) => one.index === index);
  const said = { handover: "handed over to", preempted: "preempted on", resumed: "taken over by", moved: "left" }[stage];
  const text = `${said} ${where} after ${count(tokens, "token")}`;
  return [stage === "moved" && move ? "" : text, move ? moveText(move) : "", why].filter(Boolean).join("\n");
}

function mark(name, at, text, view) {
  const element = make("span", { class: "mark", "data-tip": text, "data-mark": name }, icon(name));
  element.at = at;
  const left = (100 * (at - view.start)) / view.span;
  element.style.left = `clamp(8px, ${left}%, calc(100% - 8px))`;
  return element;
}
