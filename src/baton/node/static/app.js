// The page: polls the state, draws it, and says so when the router is away.

import { call, dropKey, hasKey, KeyNeeded, reason, server, useKey } from "./api.js";
import { Cards } from "./cards.js";
import { Chat } from "./chat.js";
import { Detail } from "./detail.js";
import { byId, setText } from "./dom.js";
import { renderEvents } from "./events.js";
import { Store } from "./store.js";
import { Tiles } from "./tiles.js";
import { Timeline } from "./timeline.js";
import { installTips } from "./tip.js";

const POLL_MS = 1000;
const HURRIED_MS = 300;
const ANSWER_MS = 4000;

const store = new Store();
const detail = new Detail();
const tiles = new Tiles();
const cards = new Cards();
const timeline = new Timeline((body) => detail.open(body, store));
const chat = new Chat(store, (busy) => poller.hurry(busy));

function render() {
  chat.render();
  tiles.render(store);
  cards.render(store, chat.serving);
  timeline.render(store);
  renderEvents(store);
  detail.render(store);
}

/** One look at a time, at a steady pace; none while nobody looks at the page. */
const poller = {
  timer: null,
  hurried: false,
  awaySince: null,

  hurry(busy) {
    this.hurried = busy;
    this.again(0);
  },

  again(delay) {
    clearTimeout(this.timer);
    if (!document.hidden) this.timer = setTimeout(() => this.look(), delay);
  },

  async look() {
    try {
      const response = await call(`/dashboard/state?${store.query}`, { signal: AbortSignal.timeout(ANSWER_MS) });
      if (!response.ok) throw new Error(await reason(response));
      store.merge(await response.json());
      this.here();
      render();
    } catch (error) {
      if (error instanceof KeyNeeded) return askForKey(error.message);
      this.away();
    }
    this.again(this.hurried ? HURRIED_MS : POLL_MS);
  },

  here() {
    this.awaySince = null;
    say("live", "Live");
    byId("away").hidden = true;
  },

  away() {
    this.awaySince ??= Date.now();
    say("away", "Reconnecting…");
    const seconds = Math.round((Date.now() - this.awaySince) / 1000);
    setText(byId("away"), `The ${server} does not answer${seconds > 1 ? `, for ${seconds} s now` : ""}. What you see is from before; trying again.`);
    byId("away").hidden = false;
  },
};

function say(link, text) {
  byId("link").dataset.link = link;
  setText(byId("link-text"), text);
}

function askForKey(why) {
  say("key", "Needs a key");
  const refused = hasKey();
  dropKey();
  if (refused) setText(byId("key-why"), why);
  byId("key").value = "";
  if (!byId("key-dialog").open) byId("key-dialog").showModal();
}

function keyGiven(event) {
  event.preventDefault();
  useKey(byId("key").value.trim());
  byId("key-dialog").close();
  start();
}

async function nameModel() {
  try {
    const response = await call("/v1/models");
    if (response.ok) setText(byId("model"), (await response.json()).data[0].id);
  } catch {
    setText(byId("model"), ""); // the poller says what is wrong
  }
}

function start() {
  nameModel();
  poller.again(0);
}

installTips();
byId("talk-goes-on").hidden = server !== "router"; // alone, nobody takes over
byId("key-form").addEventListener("submit", keyGiven);
byId("key-dialog").addEventListener("cancel", (event) => event.preventDefault());
for (const id of ["filter", "span"]) byId(id).addEventListener("change", render);
document.addEventListener("visibilitychange", () => poller.again(0));
addEventListener("resize", render);
start();
