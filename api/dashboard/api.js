// Asking this server, with the key if one was given. Addresses are relative: the page also works behind a path of a proxy.

const PLACE = "trunkline.key";
let key = "";
try {
  key = sessionStorage.getItem(PLACE) ?? "";
} catch {
  // Storage may be forbidden: then the key lasts until the page is loaded again.
}

export class ApiError extends Error {
  constructor(status, error) {
    super(error?.message ?? `The server answered with status ${status}.`);
    this.status = status;
    this.code = error?.code ?? null;
  }
}

export const hasKey = () => key !== "";

export function setKey(given) {
  key = given;
  try {
    sessionStorage.setItem(PLACE, given);
  } catch {
    // As above.
  }
}

// Who wants to know that a key is missing or wrong.
export const keyWanted = new EventTarget();

async function ask(method, path, { body, signal } = {}) {
  const headers = {};
  if (key) headers.authorization = `Bearer ${key}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  const response = await fetch(path, { method, headers, body: body === undefined ? undefined : JSON.stringify(body), signal, cache: "no-store" });
  if (response.ok) return response;
  const told = await response.json().catch(() => ({}));
  const error = new ApiError(response.status, told.error);
  if (response.status === 401) keyWanted.dispatchEvent(new Event("wanted"));
  throw error;
}

export const getJSON = async (path) => (await ask("GET", path)).json();
export const postJSON = async (path, body) => (await ask("POST", path, { body })).json();

// The data of each event of a stream, parsed, until [DONE]. Leaving the loop, or the signal, ends the request.
export async function* stream(path, body, signal) {
  const response = await ask("POST", path, { body, signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      text += value;
      const events = text.split("\n\n");
      text = events.pop();
      for (const event of events) {
        if (!event.startsWith("data: ")) continue; // a comment that keeps the connection open
        const data = event.slice(6);
        if (data === "[DONE]") return;
        const parsed = JSON.parse(data);
        if (parsed.error) throw new ApiError(200, parsed.error);
        yield parsed;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
