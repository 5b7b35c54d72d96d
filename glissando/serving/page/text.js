// Text as it comes, every token coloured by its surprise.

import { number } from "./picture.js";

/** Lower ends of the colours, in bits. */
const LEVELS = [0, 0.5, 1, 2, 3, 4, 6, 8];
const BYTES = "bytes:\\x";

const levelOf = (bits) => Math.max(0, LEVELS.findLastIndex((least) => bits >= least));

/** Fills an <ol> with what the colours mean. */
export function drawLegend(list) {
  for (const [level, least] of LEVELS.entries()) {
    const item = document.createElement("li");
    const last = level === LEVELS.length - 1;
    item.className = `bits-${level}`;
    item.textContent = last ? `${least}+` : `${least}`;
    item.title = last ? `${least} bits and more` : `${least} to ${LEVELS[level + 1]} bits`;
    list.append(item);
  }
}

/** A text that is being written into `node`, and what there is to be said of it. */
export class Text {
  constructor(node) {
    node.replaceChildren();
    this.node = node;
    this.pending = []; // tokens whose characters are not whole yet
    this.tokens = 0;
    this.bits = 0;
    this.first = this.last = 0;
  }

  get content() {
    return this.node.textContent;
  }

  /** What is new: characters, and tokens that may be parts of one. */
  push(text, logprobs) {
    const { tokens = [], token_logprobs: values = [] } = logprobs ?? {};
    for (const [index, token] of tokens.entries()) {
      const bits = -values[index] / Math.LN2;
      this.pending.push({ token, bits });
      this.tokens += 1;
      this.bits += bits;
      this.last = performance.now();
      this.first ||= this.last;
    }
    if (!text) return;
    this.node.append(...spansOf(text, this.pending).map(([part, of]) => spanOf(part, of)));
    this.pending = [];
  }

  /** "87 tokens, 41.2 tokens/s, 1.92 bits per token". */
  get summary() {
    const parts = [this.tokens === 1 ? "1 token" : `${this.tokens.toLocaleString("en")} tokens`];
    const seconds = (this.last - this.first) / 1000;
    // Pieces that came together say nothing of how long each took.
    if (seconds >= 0.25) parts.push(`${number((this.tokens - 1) / seconds)} tokens/s`);
    if (this.tokens) parts.push(`${(this.bits / this.tokens).toFixed(2)} bits per token`);
    return parts.join(", ");
  }
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
  const bytes = run.flatMap(({ token }) => (token.startsWith(BYTES) ? hexes(token) : [...new TextEncoder().encode(token)]));
  try {
    return new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(new Uint8Array(bytes));
  } catch {
    return null;
  }
}

const hexes = (token) => token.slice(BYTES.length).split("\\x").map((hex) => parseInt(hex, 16));

function spanOf(text, tokens) {
  const span = document.createElement("span");
  span.className = "token";
  span.textContent = text;
  span.tabIndex = -1;
  if (text === "\n") span.classList.add("newline");
  if (tokens.length) {
    const bits = tokens.reduce((sum, token) => sum + token.bits, 0) / tokens.length;
    span.classList.add(`bits-${levelOf(bits)}`);
    span.title = `${bits.toFixed(2)} bits${tokens.length > 1 ? `, the mean of ${tokens.length} tokens` : ""}`;
  }
  return span;
}

/** Arrow keys from token to token; `tell` is given what is under the pointer or has the focus. */
export function explore(box, tell) {
  const told = (event) => {
    const span = event.target.closest(".token");
    if (span) tell(`${JSON.stringify(span.textContent)}: ${span.title}`);
  };
  box.addEventListener("pointerover", told);
  box.addEventListener("focusin", told);
  box.addEventListener("click", told);
  box.addEventListener("keydown", (event) => {
    const next = neighbour(box, event.key);
    if (!next) return;
    event.preventDefault();
    next.focus();
  });
}

function neighbour(box, key) {
  const spans = box.getElementsByClassName("token");
  const here = document.activeElement.closest(".token");
  if (key === "Home" || (key === "ArrowRight" && !here)) return spans[0];
  if (key === "End" || (key === "ArrowLeft" && !here)) return spans[spans.length - 1];
  return { ArrowRight: here?.nextElementSibling, ArrowLeft: here?.previousElementSibling }[key];
}
