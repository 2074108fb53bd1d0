// Who came, left, drains or was suspected, latest first.

import { byId, keyed, make, setText } from "./dom.js";

export function renderEvents(store) {
  byId("no-events").hidden = store.events.length > 0;
  const latest = store.events.map((event, i) => ({ ...event, i })).reverse();
  keyed(byId("events"), latest, key, create, () => {});

  function key(event) {
    return `${event.at_us} ${event.name} ${event.what} ${event.incarnation}`;
  }

  function create(event) {
    const at = new Date(Date.now() - (store.now - event.at_us) / 1000);
    const time = make("time", { datetime: at.toISOString() });
    setText(time, at.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false }));
    const line = make("span", {}, make("b", {}, event.name), " ", make("span", { class: `what-${event.what}` }, event.what));
    return make("li", {}, time, make("span", {}, line, event.why ? make("span", { class: "why" }, event.why) : ""));
  }
}
