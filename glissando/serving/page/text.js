// Text as it comes: tokens coloured by their surprise, and marks where dials were moved.

import { number } from "./picture.js";
import { position } from "./poles.js";

/** Lower ends of the colours, in bits, for a model whose tokens have MEAN bits. */
const LEVELS = [0, 0.5, 1, 2, 3, 4, 6, 8];
const MEAN = 2;
const ENOUGH = 20; // tokens of which the mean is taken
const BYTES = "bytes:\\x";
/** Tokens behind a mark within which a dial still counts as being moved by the same hand. */
const SAME_MOVE = 6;

let scale = 1; // of LEVELS, a power of two: that of the models which write on this page
const levelOf = (bits) => Math.max(0, LEVELS.findLastIndex((least) => bits >= least * scale));
const bitsOf = (tokens) => tokens.reduce((sum, token) => sum + token.bits, 0) / tokens.length;

/** Fills an <ol> with what the colours mean. */
export function drawLegend(list) {
  const ends = LEVELS.map((least) => least * scale);
  list.replaceChildren();
  for (const [level, least] of ends.entries()) {
    const item = document.createElement("li");
    const last = level === ends.length - 1;
    item.className = `bits-${level}`;
    item.textContent = last ? `${least}+` : `${least}`;
    item.title = last ? `${least} bits and more` : `${least} to ${ends[level + 1]} bits`;
    list.append(item);
  }
}

/** Fit the colours to what these texts' tokens have in the mean. True: they have changed, and so has the legend. */
export function fitColours(texts) {
  const sum = (name) => texts.reduce((total, text) => total + text[name], 0);
  const off = Math.log2(sum("bits") / sum("tokens") / (MEAN * scale));
  if (!(sum("tokens") >= ENOUGH && Math.abs(off) > 0.75) || !Number.isFinite(off)) return false;
  scale *= 2 ** Math.round(off);
  for (const text of texts) text.recolour();
  return true;
}

/** A text that is being written into `node`. `spans` are its parts: {text, tokens, moved}, `moved` where dials were. */
export class Text {
  constructor(node, spans = []) {
    node.replaceChildren();
    this.node = node;
    this.spans = [];
    this.pending = []; // tokens whose characters are not whole yet
    this.moved = null; // dials that were moved before them
    this.begin();
    for (const span of spans) this.add(span);
  }

  /** Count anew: what stands there was written before. */
  begin() {
    this.tokens = this.bits = this.first = this.last = 0;
  }

  get content() {
    return this.spans.map((span) => span.text).join("");
  }

  /** What is new: characters, tokens that may be parts of one, and the dials that were moved before them. */
  push(text, logprobs, moved = null) {
    const { tokens = [], token_logprobs: values = [], top_logprobs: tops = [] } = logprobs ?? {};
    if (moved) this.moved = { ...this.moved, ...moved };
    for (const [index, token] of tokens.entries()) {
      const bits = -values[index] / Math.LN2;
      this.pending.push({ token, bits, top: tops?.[index] ?? {} });
      this.tokens += 1;
      this.bits += bits;
      this.last = performance.now();
      this.first ||= this.last;
    }
    if (!text) return;
    for (const [part, of] of spansOf(text, this.pending)) {
      this.add({ text: part, tokens: of, moved: this.moved });
      this.moved = null;
    }
    this.pending = [];
  }

  add(span) {
    if (span.moved) span.moved = this.mark(span.moved);
    const node = spanOf(span);
    node.dataset.at = this.spans.length;
    this.spans.push(span);
    this.node.append(node);
  }

  recolour() {
    for (const node of this.node.querySelectorAll(".token")) colour(node, this.spans[node.dataset.at].tokens);
  }

  /** A mark for dials; one that a hand has not let go of yet is moved on in its place. Gives what the new span keeps. */
  mark(moved) {
    const from = Math.max(0, this.spans.length - SAME_MOVE);
    const before = this.spans.slice(from).findLast((span) => span.moved);
    if (before) {
      Object.assign(before.moved, moved);
      const marks = this.node.querySelectorAll(".mark");
      label(marks[marks.length - 1], before.moved);
      return null;
    }
    const mark = document.createElement("span");
    mark.className = "mark";
    mark.setAttribute("role", "note");
    label(mark, moved);
    this.node.append(mark);
    return { ...moved };
  }

  /** "87 tokens, 41.2 tokens/s, 1.92 bits per token": of what was written last. */
  get summary() {
    const parts = [this.tokens === 1 ? "1 token" : `${this.tokens.toLocaleString("en")} tokens`];
    const seconds = (this.last - this.first) / 1000;
    // Pieces that came together say nothing of how long each took.
    if (seconds >= 0.25) parts.push(`${number((this.tokens - 1) / seconds)} tokens/s`);
    if (this.tokens) parts.push(`${(this.bits / this.tokens).toFixed(2)} bits per token`);
    return parts.join(", ");
  }
}

/** Its words are not part of the text: they are drawn by the style. */
function label(mark, moved) {
  const moves = Object.entries(moved).map(([name, value]) => position(name, value)).join(", ");
  mark.dataset.description = moves;
  mark.setAttribute("aria-label", `Dials moved here: ${moves}`);
}

/** [[part of the text, its tokens]]: a part is as short as its tokens' spelling can tell. */
export function spansOf(text, tokens) {
  if (tokens.length === 1) return [[text, tokens]];
  const spans = [];
  let run = [];
  for (const token of tokens) {
    run.push(token);
    const spelled = spellingOf(run);
    if (spelled && text.startsWith(spelled)) {
      spans.push([spelled, run]);
      text = text.slice(spelled.length);
      run = [];
    }
  }
  return text ? [...spans, [text, run]] : spans;
}

/** The characters that tokens make together, or null where they end within one. */
function spellingOf(run) {
  const bytes = run.flatMap(({ token }) => (isBytes(token) ? hexes(token) : [...new TextEncoder().encode(token)]));
  try {
    return new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(new Uint8Array(bytes));
  } catch {
    return null;
  }
}

/** Whether a token is spelled as bytes, being part of a character. */
export const isBytes = (token) => token.startsWith(BYTES);
const hexes = (token) => token.slice(BYTES.length).split("\\x").map((hex) => parseInt(hex, 16));

/** Bytes of UTF-8 that a token of the server is. */
export const byteLength = (token) => (isBytes(token) ? hexes(token).length : new TextEncoder().encode(token).length);

function spanOf({ text, tokens, chosen }) {
  const span = document.createElement("span");
  span.className = "token";
  span.textContent = text;
  span.tabIndex = -1;
  if (text === "\n") span.classList.add("newline");
  if (chosen) span.classList.add("chosen");
  if (tokens.length) {
    colour(span, tokens);
    const bits = bitsOf(tokens);
    span.dataset.description = `${bits.toFixed(2)} bits${tokens.length > 1 ? `, the mean of ${tokens.length} tokens` : ""}`;
  }
  return span;
}

function colour(node, tokens) {
  if (tokens.length) node.className = `${node.className.replace(/ bits-\d/, "")} bits-${levelOf(bitsOf(tokens))}`;
}

/** Arrow keys from token to token; `tell` is given the token under the pointer or with the focus, null for none. */
export function explore(box, tell) {
  const describe = (event) => tell(event.target.closest(".token"));
  for (const kind of ["pointerover", "focusin", "click"]) box.addEventListener(kind, describe);
  box.addEventListener("pointerleave", () => tell(null));
  box.addEventListener("keydown", (event) => {
    const next = neighbour(box, event.key);
    if (!next) return;
    event.preventDefault();
    next.focus();
  });
}

function neighbour(box, key) {
  const spans = [...box.getElementsByClassName("token")];
  const here = spans.indexOf(document.activeElement.closest(".token"));
  if (key === "Home" || (key === "ArrowRight" && here < 0)) return spans[0];
  if (key === "End" || (key === "ArrowLeft" && here < 0)) return spans.at(-1);
  return { ArrowRight: spans[here + 1], ArrowLeft: here > 0 ? spans[here - 1] : null }[key];
}
