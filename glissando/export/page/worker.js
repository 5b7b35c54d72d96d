// Runs the model beside the page, which so answers while a token is computed.
//
// In:  {write: {id, prompt, length, temperature, seed, control}}, {control}, {stop}
// Out: {progress}, {ready}, {begun: {prompt, seconds}}, {piece, tokens, seconds}, {end: reason}, {failed: message};
//      the last four with the id of their text

import * as ort from "./ort/ort.wasm.min.mjs";
import { Random, draw } from "./sampling.js";
import { tokenizerOf } from "./tokenizer.js";

const ARRAYS = { float32: Float32Array, float64: Float64Array, int64: BigInt64Array, int32: Int32Array, bool: Uint8Array };
const PART = 256; // tokens of a prompt that are read at a time, whose logits all stand in memory
const PATIENCE = 15; // ms between two looks at what the page asks

let model = null;
let control = [];
let stopped = false;
let writing = false;

addEventListener("message", ({ data }) => {
  if (data.control) control = data.control;
  if (data.stop) stopped = true;
  if (data.write) write(data.write);
});

load().then(
  (made) => postMessage({ ready: made }),
  (error) => postMessage({ failed: `The model cannot be loaded: ${error.message ?? error}` }),
);

// ---------------------------------------------------------------- the model

async function load() {
  ort.env.wasm.wasmPaths = new URL("./ort/", import.meta.url).href;
  ort.env.wasm.numThreads = 1; // more need headers that a plain file server does not send
  const made = JSON.parse(await text("export.json"));
  const tokenizer = tokenizerOf(made.tokenizer.kind, JSON.parse(await text(made.tokenizer.file)));
  const options = {
    executionProviders: ["wasm"],
    logSeverityLevel: 3,
    externalData: [{ path: "weights.bin", data: await weights("weights.bin") }],
  };
  const graph = new Uint8Array(await (await found(made.file)).arrayBuffer());
  model = { made, tokenizer, session: await ort.InferenceSession.create(graph, options) };
  return made;
}

async function found(file) {
  const response = await fetch(file);
  if (!response.ok) throw new Error(`${file}: ${response.status} ${response.statusText}`);
  return response;
}

async function text(file) {
  return (await found(file)).text();
}

/** The largest file, whose progress is reported. */
async function weights(file) {
  const response = await found(file);
  const size = Number(response.headers.get("content-length"));
  const parts = [];
  let loaded = 0;
  for (const reader = response.body.getReader(); ; ) {
    const { done, value } = await reader.read();
    if (done) return new Uint8Array(await new Blob(parts).arrayBuffer());
    parts.push(value);
    loaded += value.length;
    postMessage({ progress: { loaded, size } });
  }
}

/** The state before any token. */
function start() {
  return Object.fromEntries(
    model.made.state.map(({ input, dtype, shape, start }) => {
      const sizes = [1, ...shape.slice(1)];
      const count = sizes.reduce((a, b) => a * b, 1);
      const value = dtype === "int64" ? BigInt(start) : start;
      return [input, new ort.Tensor(dtype, new ARRAYS[dtype](count).fill(value), sizes)];
    }),
  );
}

/** (ids, state) -> (logits behind the last id, state) */
async function read(ids, state) {
  const { made, session } = model;
  const feeds = { ids: new ort.Tensor("int64", BigInt64Array.from(ids, BigInt), [1, ids.length]), ...state };
  if (made.dials.length) feeds.control = new ort.Tensor("float32", Float32Array.from(control), [1, made.dials.length]);
  const out = await session.run(feeds);
  const last = out.logits.data.length - made.vocab_size;
  // A vocabulary that has grown has more logits than tokens.
  const logits = out.logits.data.subarray(last, last + made.tokens);
  return [logits, Object.fromEntries(made.state.map(({ input, output }) => [input, out[output]]))];
}

// ---------------------------------------------------------------- a text

async function write(asked) {
  if (writing) return;
  writing = true;
  stopped = false;
  control = asked.control;
  const { id } = asked;
  try {
    postMessage({ id, end: await written(asked) });
  } catch (error) {
    postMessage({ id, failed: String(error.message ?? error) });
  } finally {
    writing = false;
  }
}

/** Why the text ends: `stop`, `length`, `full` or `left`. */
async function written({ id, prompt, length, temperature, seed }) {
  const { made, tokenizer } = model;
  const ids = [made.tokenizer.end, ...tokenizer.encode(prompt)];
  if (made.capacity && ids.length > made.capacity) {
    throw new Error(
      `The prompt has ${ids.length} tokens, and this model was exported for ${made.capacity}, prompt included. ` +
        "Give a shorter one, or export with a larger --capacity.",
    );
  }
  const random = new Random(seed);
  const decoder = new TextDecoder("utf-8", { ignoreBOM: true });
  const begun = performance.now();
  let yielded = begun;
  let state = start();
  let logits = null;
  for (let at = 0; at < ids.length; at += PART) {
    [logits, state] = await read(ids.slice(at, at + PART), state);
    yielded = await yieldToMessages(yielded);
    if (stopped) return "left";
  }
  const first = performance.now();
  postMessage({ id, begun: { prompt: ids.length, seconds: (first - begun) / 1000 } });
  for (let tokens = 1, position = ids.length; ; tokens++, position++) {
    const token = draw(logits, temperature, random);
    if (token === made.tokenizer.end) return flushed(id, decoder, "stop");
    const piece = decoder.decode(Uint8Array.from(tokenizer.bytes(token)), { stream: true });
    postMessage({ id, piece, tokens, seconds: (performance.now() - first) / 1000 });
    if (tokens >= length) return flushed(id, decoder, "length");
    if (made.capacity && position >= made.capacity) return flushed(id, decoder, "full");
    yielded = await yieldToMessages(yielded);
    if (stopped) return flushed(id, decoder, "left");
    [logits, state] = await read([token], state);
  }
}

/** Half a character at the end becomes U+FFFD. */
function flushed(id, decoder, reason) {
  postMessage({ id, piece: decoder.decode() });
  return reason;
}

/** Handles waiting messages of the page if PATIENCE has passed since `before` -> the time of the last such pause. */
async function yieldToMessages(before) {
  if (performance.now() - before < PATIENCE) return before;
  await new Promise((resolve) => {
    const { port1, port2 } = new MessageChannel();
    port1.onmessage = () => {
      port1.close();
      resolve();
    };
    port2.postMessage(null);
  });
  return performance.now();
}
