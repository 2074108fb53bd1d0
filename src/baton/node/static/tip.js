// One tooltip for the page: whatever has data-tip shows it, under a pointer or under the keyboard's focus.

import { byId, setText } from "./dom.js";

const tip = byId("tip");
let shownFor = null;

export function installTips() {
  document.addEventListener("pointerover", (event) => point(event.target.closest?.("[data-tip]"), event));
  document.addEventListener("pointermove", (event) => shownFor && place(event.clientX, event.clientY));
  document.addEventListener("pointerout", (event) => event.relatedTarget === null && hide());
  document.addEventListener("focusin", (event) => {
    const owner = event.target.closest?.("[data-tip]");
    if (!owner?.matches(":focus-visible")) return;
    const box = owner.getBoundingClientRect();
    show(owner, box.left + 24, box.bottom);
  });
  document.addEventListener("focusout", hide);
  document.addEventListener("keydown", (event) => event.key === "Escape" && hide());
  document.addEventListener("scroll", hide, { capture: true, passive: true });
}

function point(owner, event) {
  if (owner) show(owner, event.clientX, event.clientY);
  else hide();
}

export function show(owner, x, y, text = owner.dataset.tip) {
  shownFor = owner;
  setText(tip, text);
  tip.hidden = false;
  place(x, y);
}

export function hide() {
  shownFor = null;
  tip.hidden = true;
}

/** What is under the pointer may have been drawn anew: say what is true now, or nothing. */
export function refreshTip() {
  if (!shownFor) return;
  if (!shownFor.isConnected) hide();
  else if (shownFor.dataset.tip) setText(tip, shownFor.dataset.tip);
}

function place(x, y) {
  const { width, height } = tip.getBoundingClientRect();
  const left = Math.min(x + 14, innerWidth - width - 8);
  const below = y + 18 + height < innerHeight;
  tip.style.left = `${Math.max(8, left)}px`;
  tip.style.top = `${below ? y + 18 : Math.max(8, y - height - 12)}px`;
}
