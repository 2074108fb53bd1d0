// Sparklines and stacked areas over the last minutes, as SVG. x is time: a gap in the samples is a gap in the drawing.

import { draw } from "./dom.js";
import { hide, show } from "./tip.js";
import { ago, BLOCKS, STACK, whole } from "./words.js";

const GAP_US = 3.5e6;
const WIDTH = 300;
const HEIGHT = 100;

/** `view`: {now, span}. */
const xOf = (at, view) => (1 - (view.now - at) / view.span) * WIDTH;

/** Runs of rows without a gap in time. */
function runs(rows) {
  const found = [];
  let last = -Infinity;
  for (const row of rows) {
    if (row[0] - last > GAP_US) found.push([]);
    found.at(-1).push(row);
    last = row[0];
  }
  return found;
}

const path = (points) => points.map(([x, y], i) => `${i ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");

export function sparkline() {
  const under = draw("path", { class: "under" });
  const second = draw("path", { class: "line second" });
  const line = draw("path", { class: "line" });
  const box = { class: "spark", viewBox: `0 0 ${WIDTH} 40`, preserveAspectRatio: "none", "aria-hidden": "true" };
  const svg = draw("svg", box, under, second, line);
  /** `values(row)`: a number, or null where nothing was measured. */
  const update = (rows, view, values, others = null) => {
    const all = rows.flatMap((row) => [values(row), others?.(row)]).filter((value) => Number.isFinite(value));
    const top = Math.max(...all, 1e-9) * 1.15;
    const points = (of) => (run) => run.map((row) => [xOf(row[0], view), 38 - (36 * of(row)) / top]);
    const drawn = (of) => runs(rows.filter((row) => Number.isFinite(of(row)))).map(points(of));
    const main = drawn(values);
    line.setAttribute("d", main.map(path).join(""));
    under.setAttribute("d", main.map((run) => `${path(run)}L${run.at(-1)[0]} 40L${run[0][0]} 40Z`).join(""));
    second.setAttribute("d", others ? drawn(others).map(path).join("") : "");
  };
  return { svg, update };
}

export function stackedArea() {
  const areas = STACK.map((column) => draw("path", { class: `b-${BLOCKS[column][0]}` }));
  const cross = draw("path", { class: "cross", visibility: "hidden" });
  const box = { class: "area", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" };
  const svg = draw("svg", box, ...areas, cross);
  let seen = { rows: [], view: { now: 0, span: 1 } };
  const update = (rows, view, blocks, label) => {
    seen = { rows, view };
    svg.setAttribute("aria-label", label);
    const parts = runs(rows);
    STACK.forEach((_, level) => areas[level].setAttribute("d", parts.map((run) => band(run, level, view, blocks)).join("")));
  };
  svg.addEventListener("pointermove", (event) => inspect(event, svg, cross, seen));
  svg.addEventListener("pointerleave", () => {
    cross.setAttribute("visibility", "hidden");
    hide();
  });
  return { svg, update };
}

/** The area between what is below a level and what is below the next. */
function band(run, level, view, blocks) {
  const height = (row, levels) => STACK.slice(0, levels).reduce((sum, column) => sum + row[1 + column], 0);
  const y = (row, levels) => HEIGHT * (1 - height(row, levels) / Math.max(blocks, 1));
  const upper = run.map((row) => [xOf(row[0], view), y(row, level + 1)]);
  const lower = run.map((row) => [xOf(row[0], view), y(row, level)]).reverse();
  return `${path([...upper, ...lower])}Z`;
}

function inspect(event, svg, cross, { rows, view }) {
  if (!rows.length) return;
  const box = svg.getBoundingClientRect();
  const at = view.now - (1 - (event.clientX - box.left) / box.width) * view.span;
  const nearest = rows.reduce((best, row) => (Math.abs(row[0] - at) < Math.abs(best[0] - at) ? row : best));
  const x = xOf(nearest[0], view).toFixed(1);
  cross.setAttribute("d", `M${x} 0V${HEIGHT}`);
  cross.setAttribute("visibility", "visible");
  const lines = STACK.toReversed().map((column) => `${BLOCKS[column][1]}: ${whole(nearest[1 + column])}`);
  const text = [ago(view.now - nearest[0]), ...lines, `running ${nearest[6]}, waiting ${nearest[7]}`].join("\n");
  show(svg, event.clientX, event.clientY, text);
}
