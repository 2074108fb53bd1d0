// Making and changing elements. Text only ever goes in as text: nothing here, or anywhere on the page, parses markup.

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

/** make("p", {class: "note", title: "…"}, "text", child, …); attributes that are null are left out. */
export function make(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

export function draw(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) if (value !== null) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Children in the order of `items`, one each, kept from call to call by key so that focus and hover survive. */
export function keyed(parent, items, key, create, update) {
  const old = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  let at = parent.firstElementChild;
  for (const item of items) {
    const name = String(key(item));
    let child = old.get(name);
    if (child === undefined) {
      child = create(item);
      child.dataset.key = name;
    }
    old.delete(name);
    if (child === at) at = at.nextElementSibling;
    else parent.insertBefore(child, at);
    update(child, item);
  }
  for (const child of old.values()) child.remove();
}

export function icon(name) {
  return draw("svg", { class: `mark-icon m-${name}`, "aria-hidden": "true" }, draw("use", { href: `#mark-${name}` }));
}
