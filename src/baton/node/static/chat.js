// A small chat through the ordinary API, which shows who serves it and, in a demonstration, can kill that instance.

import { call, isDemo, kill, post, reason } from "./api.js";
import { byId, icon, make, setText } from "./dom.js";
import { eventsOf } from "./sse.js";
import { count, duration, giverOf, moveText, movesOf, placeOf } from "./words.js";

const AWAY_MS = 60_000; // how long a router may be away
const BACK_MS = 5_000; // how long one that is back may not know of the answer: its instances have yet to join
const RESUME_PAUSE_MS = 400;

class Answer {
  /** One answer under way: its text, how many tokens had come at which character, and where it is shown. */
  constructor(id) {
    this.id = id;
    this.text = "";
    this.tokens = 0;
    this.lastEvent = null;
    this.reached = [[0, 0]]; // (tokens, characters), rising
    this.before = document.createTextNode("");
    this.body = make("span", { class: "words" }, this.before);
    this.tail = this.before;
    this.seams = 0;
    this.foot = make("span", { class: "foot" });
    this.element = make("div", { class: "said assistant", "aria-busy": "true" }, this.body, this.foot);
    this.done = false;
    this.stopped = false;
    this.away = false;
    this.started = performance.now();
    this.firstMs = null;
  }

  take(event) {
    if (event.data === "[DONE]") {
      this.done = true;
      return;
    }
    const said = JSON.parse(event.data);
    if (said.error) throw new Error(said.error.message);
    if (event.id) this.lastEvent = event.id;
    const delta = said.choices?.[0]?.delta?.content ?? "";
    if (!delta && !said.usage) return;
    this.firstMs ??= performance.now() - this.started;
    const numbered = parseInt(event.id ?? "", 10); // events are numbered by the tokens that have come with them
    this.tokens = said.usage?.completion_tokens ?? (Number.isNaN(numbered) ? this.tokens + 1 : numbered);
    this.text += delta;
    this.reached.push([this.tokens, this.text.length]);
    this.tail.appendData(delta);
  }

  /** A thin line in the text where it went on elsewhere. It holds no text, so the answer reads and copies as it was. */
  showMoves(moves) {
    for (; this.seams < moves.length; this.seams += 1) {
      const move = moves[this.seams];
      if (!move.to || move.tokens > this.tokens) return; // its text is yet to come
      const at = this.reached.findLast(([tokens]) => tokens <= move.tokens)[1];
      const seam = make("span", { class: "seam", "data-tip": moveText(move) });
      const start = this.text.length - this.tail.length;
      const rest = this.tail.splitText(Math.max(0, Math.min(at - start, this.tail.length)));
      rest.before(seam);
      this.tail = rest;
    }
  }

  fail(message) {
    this.foot.before(make("span", { class: "fault" }, message));
  }
}

export class Chat {
  /** `hurry(true)`: the state shall be looked at more often. */
  constructor(store, hurry) {
    this.store = store;
    this.hurry = hurry;
    this.messages = [];
    this.answer = null;
    this.model = null;
    this.killed = null;
    this.talk = byId("talk");
    this.invitation = byId("talk-empty");
    byId("ask").addEventListener("submit", (event) => this.#submitted(event));
    byId("question").addEventListener("keydown", (event) => this.#key(event));
    byId("stop").addEventListener("click", () => this.#stop());
    byId("kill").addEventListener("click", () => this.#kill());
    byId("chat-clear").addEventListener("click", () => this.#clear());
    byId("kill").hidden = !isDemo;
  }

  /** The instance that serves the answer under way, or "". */
  get serving() {
    const lane = this.#lane();
    return lane && this.answer && !this.answer.done ? placeOf(lane) : "";
  }

  #lane() {
    return this.answer ? (this.store.request(this.answer.id)?.lanes[0] ?? null) : null;
  }

  #key(event) {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    byId("ask").requestSubmit();
  }

  #submitted(event) {
    event.preventDefault();
    const question = byId("question").value.trim();
    if (!question || this.answer?.done === false) return;
    byId("question").value = "";
    this.messages.push({ role: "user", content: question });
    this.talk.append(make("div", { class: "said user" }, question));
    this.#run();
  }

  async #run() {
    const answer = (this.answer = new Answer(`chat-${crypto.getRandomValues(new Uint32Array(2)).join("-")}`));
    this.abort = new AbortController();
    this.killed = null;
    this.store.mine.add(answer.id);
    this.talk.append(answer.element);
    this.#busy(true);
    try {
      await this.#stream(answer);
    } catch (error) {
      if (!answer.stopped) answer.fail(error.message);
    } finally {
      this.messages.push({ role: "assistant", content: answer.text });
      answer.done = true;
      answer.away = false;
      answer.element.setAttribute("aria-busy", "false");
      this.#busy(false);
      this.render();
    }
  }

  /** Ask, and read to the end; where the router goes away in between, come back for the rest. */
  async #stream(answer) {
    this.model ??= (await (await call("/v1/models")).json()).data[0].id;
    const body = { model: this.model, messages: this.messages, stream: true, stream_options: { include_usage: true },
      max_tokens: Number(byId("length").value), temperature: 0.7, seed: 7 };
    const ask = () => post("/v1/chat/completions", body, { headers: { "X-Request-Id": answer.id }, signal: this.abort.signal });
    let response = await ask();
    for (;;) {
      if (!response.ok) throw new Error(await reason(response));
      try {
        await this.#read(answer, response);
      } catch (error) {
        if (!(error instanceof TypeError)) throw error; // fetch's way to say that the connection broke
      }
      if (answer.done) return;
      response = await this.#resumed(answer);
    }
  }

  async #read(answer, response) {
    for await (const event of eventsOf(response)) {
      const atEnd = this.talk.scrollHeight - this.talk.scrollTop - this.talk.clientHeight < 40;
      answer.take(event);
      if (atEnd) this.talk.scrollTop = this.talk.scrollHeight;
      this.#foot(answer);
    }
  }

  async #resumed(answer) {
    if (answer.lastEvent === null) throw new Error("The connection was lost before the answer began");
    let deadline = performance.now() + AWAY_MS;
    let isBack = false;
    answer.away = true;
    this.#foot(answer);
    for (;;) {
      await new Promise((resolve) => setTimeout(resolve, RESUME_PAUSE_MS));
      try {
        const headers = { "Last-Event-ID": answer.lastEvent };
        const response = await call(`/v1/requests/${answer.id}/stream`, { headers, signal: this.abort.signal });
        if (!isBack) deadline = performance.now() + BACK_MS;
        isBack = true;
        answer.away = !response.ok && performance.now() < deadline;
        if (!answer.away) return response;
      } catch (error) {
        if (!(error instanceof TypeError) || performance.now() > deadline) throw error;
      }
    }
  }

  #stop() {
    this.answer.stopped = true;
    this.abort.abort();
  }

  async #kill() {
    const instance = this.store.instance(this.serving);
    if (!instance) return;
    byId("kill").disabled = true;
    this.killed = instance;
    const response = await kill(instance).catch((error) => error);
    if (!response.ok) {
      this.killed = null;
      this.answer.fail(`${instance.name} was not killed: ${response.message ?? (await reason(response))}`);
    }
    this.render();
  }

  #clear() {
    if (this.answer?.done === false) this.#stop();
    this.messages = [];
    this.answer = null;
    this.talk.replaceChildren(this.invitation);
    byId("serving").hidden = true;
    byId("chat-clear").hidden = true;
    byId("question").focus();
  }

  #busy(busy) {
    this.invitation.remove();
    byId("send").disabled = busy;
    byId("stop").hidden = !busy;
    byId("chat-clear").hidden = false;
    this.hurry(busy);
    this.talk.scrollTop = this.talk.scrollHeight;
  }

  #foot(answer) {
    const parts = [count(answer.tokens, "token")];
    if (answer.firstMs !== null) parts.push(`first after ${duration(answer.firstMs * 1000)}`);
    if (answer.stopped) parts.push("stopped");
    setText(answer.foot, answer.away ? "The router is away; instances keep the answer for a while. Trying to go on…" : parts.join(" · "));
  }

  render() {
    const { answer, serving } = this;
    const button = byId("kill");
    button.disabled = !serving || this.killed?.name === serving;
    button.dataset.tip = serving ? `Ends the process of ${serving} at once (SIGKILL)` : "There is an instance to kill while an answer comes";
    if (!answer) return;
    const lane = this.#lane();
    const moves = lane ? movesOf(lane) : [];
    answer.showMoves(moves);
    this.#foot(answer);
    byId("serving").hidden = false;
    const lines = [this.#now(lane, serving)];
    if (this.killed) lines.push(make("span", {}, `Killed ${this.killed.name}, process ${this.killed.pid}.`));
    lines.push(...moves.map((move) => make("span", { class: "moved-line" }, icon("moved"), `${capital(moveText(move))}.`)));
    const said = lines.map((line) => line.textContent).join("\n");
    if (said !== this.said) byId("serving").replaceChildren(...lines); // said aloud only where it changes
    this.said = said;
  }

  #now(lane, serving) {
    if (this.answer.done) {
      const place = lane ? placeOf(lane) : "";
      return make("span", {}, ...(place ? ["Answered by ", make("b", {}, place), "."] : ["Answered."]));
    }
    if (!serving) return make("span", {}, "Waiting for an instance…");
    const giver = lane.segments.map(giverOf).findLast(Boolean);
    const by = giver ? `, prefilled by ${giver}` : "";
    return make("span", {}, "Served by ", make("b", {}, serving), `${by}.`);
  }
}

const capital = (text) => text[0].toUpperCase() + text.slice(1);
