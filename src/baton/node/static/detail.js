// Everything that is known of one request, in a dialog; kept up to date while it is open.

import { byId, make } from "./dom.js";
import { count, duration, moveText, movesOf, stageOf, standing } from "./words.js";

export class Detail {
  constructor() {
    this.dialog = byId("detail");
    this.body = null;
    this.drawn = "";
    byId("detail-close").addEventListener("click", () => this.dialog.close());
    this.dialog.addEventListener("click", (event) => event.target === this.dialog && this.dialog.close());
    this.dialog.addEventListener("close", () => (this.body = null));
  }

  open(body, store) {
    this.body = body;
    this.drawn = "";
    this.render(store);
    this.dialog.showModal();
  }

  render(store) {
    const request = this.body === null ? null : store.requests.get(this.body);
    if (!request) return;
    const drawn = JSON.stringify(request);
    if (drawn === this.drawn) return; // so that text can be selected
    this.drawn = drawn;
    byId("detail-title").textContent = `Request ${request.id || request.body}`;
    byId("detail-body").replaceChildren(
      summary([["Asked at", request.path], ["Prompt", request.prompt_tokens === null ? "–" : count(request.prompt_tokens, "token")], ["Choices", String(request.choices)]]),
      ...request.lanes.map((lane, i) => laneDetail(lane, i, request)),
    );
  }
}

function summary(pairs) {
  const list = make("dl", { class: "summary" });
  for (const [name, value] of pairs) list.append(make("div", {}, make("dt", {}, name), make("dd", {}, value)));
  return list;
}

function laneDetail(lane, index, request) {
  const perToken = lane.tokens > 1 && lane.first_us !== null ? (lane.last_us - lane.first_us) / (lane.tokens - 1) : null;
  const figures = summary([
    ["State", standing(lane)[1]],
    ["Answer", count(lane.tokens, "token")],
    ["First token after", duration(lane.first_us === null ? null : lane.first_us - request.began_us)],
    ["Time per token", duration(perToken)],
    ["Whole", duration(lane.ended_us === null ? null : lane.ended_us - request.began_us)],
  ]);
  figures.append(make("div", { class: "full" }, make("dt", {}, "Moves"), make("dd", {}, movesOf(lane).map(moveText).join("; ") || "none")));
  const box = make("section", {}, figures, make("div", { class: "steps-scroll" }, steps(lane, index, request)));
  if (lane.left_out) box.append(make("p", { class: "empty" }, `${count(lane.left_out, "note")} in between are not kept.`));
  return box;
}

function steps(lane, index, request) {
  const head = make("tr", {});
  for (const [name, kind] of [["Stage", ""], ["Instance", ""], ["Start", "number"], ["Took", "number"], ["Tokens by then", "number"], ["Why", ""]]) {
    head.append(make("th", { scope: "col", class: kind || null }, name));
  }
  const rows = lane.segments.map(([stage, where, start, end, tokens, why]) => {
    const { look, name } = stageOf(stage);
    return make(
      "tr",
      {},
      make("td", {}, make("span", { class: `swatch s-${look}`, "aria-hidden": "true" }), name),
      make("td", { class: "where" }, where || "–"),
      make("td", { class: "number" }, `+${duration(start - request.began_us)}`),
      make("td", { class: "number" }, end === null ? "…" : duration(end - start)),
      make("td", { class: "number" }, String(tokens)),
      make("td", { class: "why" }, why.replace(/^lost: (?=.* was lost)/, "")),
    );
  });
  const title = request.choices > 1 ? `Choice ${index}` : "Stages";
  return make("table", {}, make("caption", {}, title), make("thead", {}, head), make("tbody", {}, ...rows));
}
