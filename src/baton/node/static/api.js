// Calls to the server that served this page, with the key of this tab where there is one.

const KEY = "baton-key";
const token = document.querySelector('meta[name="baton-token"]').content;
export const isDemo = document.querySelector('meta[name="baton-demo"]').content === "demo";

/** What serves this page: "router", or "instance" where it is alone. */
export const server = document.querySelector('meta[name="baton-server"]').content;

export class KeyNeeded extends Error {}

export const hasKey = () => sessionStorage.getItem(KEY) !== null;
export const useKey = (key) => sessionStorage.setItem(KEY, key);
export const dropKey = () => sessionStorage.removeItem(KEY);

export async function call(path, { headers = {}, ...options } = {}) {
  const key = sessionStorage.getItem(KEY);
  const authorization = key === null ? {} : { Authorization: `Bearer ${key}` };
  const response = await fetch(path, { cache: "no-store", ...options, headers: { ...headers, ...authorization } });
  // It stands in every 401, and in a 403 where another key would do.
  if (response.headers.has("WWW-Authenticate")) throw new KeyNeeded(await reason(response));
  return response;
}

export const post = (path, body, { headers = {}, ...options } = {}) =>
  call(path, { method: "POST", body: JSON.stringify(body), headers: { "Content-Type": "application/json", ...headers }, ...options });

export const kill = (instance) =>
  post("/dashboard/kill", { name: instance.name, incarnation: instance.incarnation }, { headers: { "X-Baton-Token": token } });

/** What an answer that is no success says of itself. */
export async function reason(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the ${server} answered ${response.status}`;
  }
}
