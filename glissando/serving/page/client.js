// The server's answers: JSON, events, and failures as something that can be shown to a person.

const KEY = "glissando-key";

/** What went wrong. `status` is HTTP's, 0 where there was no answer; `param` the field that was at fault. */
export class Failure extends Error {
  constructor(status, message, { code = null, param = null } = {}) {
    super(message);
    Object.assign(this, { status, code, param });
  }

  /** What happened and what to do about it. */
  get sentence() {
    return `${sentence(this.message)} ${this.remedy}`.trim();
  }

  get remedy() {
    if (this.code === "context_length_exceeded") return "Shorten the prompt, then write again.";
    if (this.code === "model_not_found") return "Reload this page.";
    if (this.status === 0) return "See that glissando serve still runs and can be reached, then write again.";
    if (this.status === 429 || this.status === 503) return "Write again in a moment.";
    return this.status >= 500 ? "Try again; the server's own output says more." : "";
  }
}

function sentence(text) {
  const whole = text.charAt(0).toUpperCase() + text.slice(1);
  return /[.!?]$/.test(whole) ? whole : `${whole}.`;
}

export function setKey(key) {
  sessionStorage.setItem(KEY, key);
}

export const hasKey = () => sessionStorage.getItem(KEY) !== null;

/** JSON from GET, or from POST where there is a body. Throws Failure, or AbortError when given up. */
export async function json(path, body) {
  const response = await request(path, body);
  try {
    return await response.json();
  } catch {
    throw new Failure(0, "the server's answer broke off");
  }
}

/** The response to a request, its status ok. */
export async function request(path, body, signal) {
  const options = { signal, headers: {}, method: body === undefined ? "GET" : "POST", cache: "no-store" };
  if (body !== undefined) {
    options.body = JSON.stringify(body);
    options.headers["content-type"] = "application/json";
  }
  // A header takes no letters beyond Latin-1, and the server compares UTF-8.
  if (hasKey()) options.headers.authorization = `Bearer ${latin(sessionStorage.getItem(KEY))}`;
  const response = await fetch(path, options).catch((error) => {
    throw error.name === "AbortError" ? error : new Failure(0, "the server does not answer");
  });
  if (!response.ok) throw await refusal(response);
  return response;
}

const latin = (text) => String.fromCharCode(...new TextEncoder().encode(text));

async function refusal(response) {
  const text = await response.text().catch(() => "");
  const reported = errorOf(text) ?? { message: text.slice(0, 300) || `the server answered ${response.status}` };
  return new Failure(response.status, reported.message, reported);
}

function errorOf(text) {
  try {
    return JSON.parse(text).error ?? null;
  } catch {
    return null; // a proxy's page, say: its text is shown as it is
  }
}

/** The chunks of a streamed answer. Throws Failure when it tells of one, breaks off, or ends without its [DONE]. */
export async function* chunks(body) {
  for await (const data of events(body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Failure(chunk.error.code === "stopping" ? 503 : 500, chunk.error.message, chunk.error);
    yield chunk;
  }
  throw new Failure(0, "the text broke off: the server ended it without saying that it was done");
}

/** The data of server-sent events, wherever the borders of the network's pieces fall. */
export async function* events(body) {
  const reader = body.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read().catch((error) => {
      throw error.name === "AbortError" ? error : new Failure(0, "the connection to the server was lost");
    });
    if (done) return;
    rest += decoder.decode(value, { stream: true });
    const parts = rest.split(/\r?\n\r?\n/);
    rest = parts.pop();
    yield* parts.map(dataOf).filter((data) => data !== "");
  }
}

function dataOf(event) {
  const lines = event.split(/\r?\n/).filter((line) => line.startsWith("data:"));
  return lines.map((line) => line.slice(5).replace(/^ /, "")).join("\n");
}

/** Calls of `task` that never overlap, `pause()` ms apart at least; what is asked for meanwhile is done once, after. */
export function paced(task, pause) {
  let wanted = false;
  let busy = false;
  return async () => {
    wanted = true;
    if (busy) return;
    busy = true;
    try {
      while (wanted) {
        wanted = false;
        await task();
        await new Promise((resolve) => setTimeout(resolve, pause()));
      }
    } finally {
      busy = false;
    }
  };
}
