// Shows the OpenAPI document of the server that served this page. Text only ever goes in as text.

const KEY = "baton-key";
const METHODS = ["get", "post", "delete"];
const DEPTH_MAX = 6;
const byId = (id) => document.getElementById(id);

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

async function load() {
  const key = sessionStorage.getItem(KEY);
  const response = await fetch("/openapi.json", { cache: "no-store", headers: key === null ? {} : { Authorization: `Bearer ${key}` } });
  if (response.status === 401) return askForKey(key !== null);
  if (!response.ok) throw new Error(`/openapi.json answered ${response.status}`);
  show(await response.json());
}

function askForKey(wasWrong) {
  byId("loading").hidden = true;
  byId("key-form").hidden = false;
  if (wasWrong) trouble("This key is not known here.");
  else byId("trouble").hidden = true;
  byId("key").focus();
}

function trouble(text) {
  byId("trouble").textContent = text;
  byId("trouble").hidden = false;
}

function show(api) {
  byId("key-form").hidden = byId("trouble").hidden = true;
  byId("version").textContent = api.info.version;
  const shown = [];
  for (const [path, operations] of Object.entries(api.paths))
    for (const method of METHODS) if (operations[method]) shown.push(operation(api, path, method, operations[method]));
  byId("operations").replaceChildren(...shown);
}

function operation(api, path, method, told) {
  const head = make("summary", {}, make("span", { class: `method ${method}` }, method.toUpperCase()),
    make("span", { class: "path" }, path), make("span", { class: "says" }, told.summary ?? ""));
  const inside = make("div");
  const details = make("details", { class: "operation", id: `${method}${path}` }, head, inside);
  // Filled when it is opened: the bodies of all operations together are thousands of rows.
  details.addEventListener("toggle", () => {
    if (details.open && !inside.hasChildNodes()) inside.append(...content(api, path, method, told));
  });
  return details;
}

function content(api, path, method, told) {
  const parts = [];
  if (told.description) parts.push(make("p", {}, told.description));
  if (told.parameters?.length) {
    const rows = told.parameters.map((one) => row(api, one.name, one.schema ?? {}, one.required, `in ${one.in}`, 0));
    parts.push(make("h2", {}, "Parameters"), make("table", {}, ...rows));
  }
  const body = told.requestBody?.content?.["application/json"]?.schema;
  if (body) parts.push(make("h2", {}, "Body"), fields(api, body, 0));
  parts.push(make("h2", {}, "Example"), make("pre", {}, example(api, path, method, body, told)));
  const rows = Object.entries(told.responses).map(([status, one]) => answer(api, status, one));
  parts.push(make("h2", {}, "Answers"), make("table", {}, ...rows));
  return parts;
}

function answer(api, status, told) {
  const cell = make("td", {}, told.description);
  const schema = told.content?.["application/json"]?.schema;
  if (schema && status === "200") cell.append(make("details", { class: "inner" }, make("summary", { class: "soft" }, "fields"), fields(api, schema, 0)));
  return make("tr", {}, make("td", {}, status), cell);
}

function example(api, path, method, body, told) {
  const key = told.security?.length === 0 || !(told.security ?? api.security) ? "" : " -H 'Authorization: Bearer KEY'";
  const data = body === undefined ? "" : ` -H 'Content-Type: application/json' \\\n  -d '${JSON.stringify(sample(api, body))}'`;
  return `curl${method === "delete" ? " -X DELETE" : ""} ${location.origin}${path}${key}${data}`;
}

function sample(api, schema) {
  const { properties = {}, required = [] } = resolved(api, schema);
  return Object.fromEntries(required.map((name) => [name, sampleOf(api, name, properties[name] ?? {})]));
}

function sampleOf(api, name, schema) {
  if (name === "messages") return [{ role: "user", content: "Hello" }];
  const found = resolved(api, schema);
  const type = found.type ?? (found.anyOf ?? []).map((one) => resolved(api, one).type).find((one) => one && one !== "null");
  return { string: "…", integer: 16, number: 1, boolean: true, array: [], object: {} }[type] ?? "…";
}

// ── schemas ──────────────────────────────────────────────────────────────────────────────────────────────────────────────

function resolved(api, schema) {
  let found = schema;
  for (let times = 0; found?.$ref && times < DEPTH_MAX; times++) found = found.$ref.split("/").slice(1).reduce((at, name) => at?.[name], api);
  return found ?? {};
}

function fields(api, schema, depth) {
  const { properties = {}, required = [], anyOf } = resolved(api, schema);
  const names = Object.keys(properties).sort((a, b) => required.includes(b) - required.includes(a));
  if (!names.length && anyOf && depth < DEPTH_MAX) return make("div", {}, ...anyOf.map((one) => fields(api, one, depth + 1)));
  if (!names.length) return make("p", { class: "type" }, typeOf(api, schema));
  return make("table", {}, ...names.map((name) => row(api, name, properties[name], required.includes(name), "", depth)));
}

function row(api, name, schema, needed, note, depth) {
  const cell = make("td", {}, make("span", { class: "type" }, typeOf(api, schema)));
  if (needed) cell.append(" ", make("span", { class: "needed" }, "required"));
  const told = [note, schema.description ?? resolved(api, schema).description ?? "", bounds(schema)].filter(Boolean).join("; ");
  if (told) cell.append(make("div", {}, told));
  const inner = depth < DEPTH_MAX ? parts(api, schema) : [];
  for (const one of inner) {
    const title = make("summary", { class: "soft" }, one.title ?? "fields");
    const details = make("details", { class: "inner" }, title);
    details.addEventListener("toggle", () => details.childElementCount === 1 && details.append(fields(api, one, depth + 1)));
    cell.append(details);
  }
  return make("tr", {}, make("td", {}, name), cell);
}

/** The objects that a value of this schema may be, or hold. */
function parts(api, schema) {
  const found = resolved(api, schema);
  if (found.properties) return [found];
  return [...(found.anyOf ?? found.oneOf ?? []), ...(found.items ? [found.items] : [])].flatMap((one) => parts(api, one));
}

function typeOf(api, schema) {
  const found = resolved(api, schema);
  if (found.const !== undefined) return JSON.stringify(found.const);
  if (found.enum) return found.enum.map((one) => JSON.stringify(one)).join(" | ");
  const choices = found.anyOf ?? found.oneOf;
  if (choices) return [...new Set(choices.map((one) => typeOf(api, one)))].join(" | ");
  if (found.type === "array") return `array of ${found.items ? typeOf(api, found.items) : "any"}`;
  return Array.isArray(found.type) ? found.type.join(" | ") : found.type ?? "any";
}

function bounds(schema) {
  const of = [schema, ...(schema.anyOf ?? [])];
  const least = of.map((one) => one.minimum ?? one.exclusiveMinimum).find((one) => one !== undefined);
  const most = of.map((one) => one.maximum ?? one.exclusiveMaximum).find((one) => one !== undefined);
  const usual = schema.default === undefined || schema.default === null ? "" : `default ${JSON.stringify(schema.default)}`;
  const range = [least === undefined ? "" : `from ${least}`, most === undefined ? "" : `to ${most}`].filter(Boolean).join(" ");
  return [range, usual].filter(Boolean).join("; ");
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, byId("key").value);
  load().catch((error) => trouble(error.message));
});
load().catch((error) => trouble(error.message));
