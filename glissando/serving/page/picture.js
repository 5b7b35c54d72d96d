// Tables of rows by tokens as heat maps.

const WIDEST = 12; // of a token, in pixels
const GAP = 8; // between the rows' names and the map
const FONT = 11;
/** How many rows up and tokens to the right a key goes. */
const MOVES = {
  ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [1, 0], ArrowDown: [-1, 0],
  Home: [0, -Infinity], End: [0, Infinity],
};

/** The figures of a box: one for each look, kept from answer to answer. */
export class Pictures {
  /** `pointed` is called with the token, by its place, that is under the pointer or chosen by keys; null for none. */
  constructor(box, pointed) {
    Object.assign(this, { box, pointed });
    this.figures = new Map();
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.redraw());
    new ResizeObserver(() => this.redraw()).observe(box);
  }

  show({ tokens, looks }) {
    const names = looks.map((look) => look.name);
    for (const [name, picture] of this.figures) {
      if (names.includes(name)) continue;
      picture.figure.remove();
      this.figures.delete(name);
    }
    for (const look of looks) {
      if (!this.figures.has(look.name)) this.figures.set(look.name, new Picture(this.box, this.pointed));
      this.figures.get(look.name).show(look, tokens);
    }
  }

  /** Frame a token's column in every picture; null: none. */
  point(column) {
    for (const picture of this.figures.values()) picture.point(column);
  }

  redraw() {
    for (const picture of this.figures.values()) picture.draw();
  }
}

class Picture {
  constructor(box, pointed) {
    this.pointed = pointed;
    this.column = null; // framed from outside
    this.figure = append(box, "figure");
    this.title = append(this.figure, "figcaption");
    this.canvas = append(this.figure, "canvas");
    this.canvas.setAttribute("role", "application"); // a reader hands arrow keys on
    this.canvas.tabIndex = 0;
    const scale = append(this.figure, "div", "scale");
    this.low = append(scale, "span");
    append(scale, "span", "ramp").setAttribute("aria-hidden", "true");
    this.high = append(scale, "span");
    this.readout = append(this.figure, "p", "readout");
    this.about = append(this.figure, "p");
    this.canvas.addEventListener("pointermove", (event) => this.tell(event));
    this.canvas.addEventListener("pointerleave", () => {
      this.rest();
      this.pointed(this.chosen?.[1] ?? null);
    });
    this.canvas.addEventListener("keydown", (event) => this.move(event));
    this.canvas.addEventListener("blur", () => this.choose(null));
  }

  show(look, tokens) {
    Object.assign(this, { look, tokens, range: rangeOf(look) });
    if (this.chosen && look.values[this.chosen[0]]?.[this.chosen[1]] === undefined) this.chosen = null;
    this.readout.setAttribute("aria-live", "off");
    const { low, middle, high } = this.range;
    this.title.textContent = look.title;
    this.about.textContent = look.about;
    this.low.textContent = number(low);
    this.high.textContent = `${amount(high, look.unit)}${look.log ? ", logarithmic" : ""}`;
    const size = `${look.rows.length} rows from ${look.rows[0]} to ${look.rows.at(-1)}, ${tokens.length} tokens`;
    const ends = `at least ${number(low)}, median ${number(middle)}, at most ${amount(high, look.unit)}`;
    this.canvas.setAttribute("aria-label", `${look.title} over ${size}: ${ends}. Arrow keys go from cell to cell.`);
    this.rest();
    this.draw();
  }

  /** What the keys have chosen, and the median where that is nothing. */
  rest() {
    if (this.chosen) {
      this.say(...this.chosen);
      return;
    }
    const count = this.tokens.length;
    this.readout.textContent = `Median ${amount(this.range.middle, this.look.unit)}; the last ${count} tokens, the newest at the right.`;
  }

  draw() {
    const { canvas, look, tokens } = this;
    const pen = canvas.getContext("2d");
    const style = getComputedStyle(canvas);
    const font = `${FONT}px ${style.fontFamily}`;
    pen.font = font;
    const left = Math.ceil(Math.max(...look.rows.map((row) => pen.measureText(row).width))) + GAP;
    const width = canvas.clientWidth;
    const tall = Math.max(2, Math.min(16, Math.floor(260 / look.rows.length)));
    const wide = Math.min(WIDEST, (width - left) / tokens.length);
    const spelled = tokens.every((token) => pen.measureText(token).width <= wide);
    this.grid = { left, tall, wide };
    const height = tall * look.rows.length + (spelled ? FONT + 6 : 0);
    const ratio = window.devicePixelRatio;
    canvas.style.height = `${height}px`;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    this.paint(pen, heat(style), ratio);
    pen.scale(ratio, ratio);
    Object.assign(pen, { font, fillStyle: style.getPropertyValue("--soft"), textBaseline: "middle" });
    this.name(pen);
    if (spelled) this.spell(pen);
    if (this.column !== null) this.frame(pen, style, look.rows.length - 1, this.column, look.rows.length);
    if (this.chosen) this.frame(pen, style, ...this.chosen, 1);
  }

  /** In the device's own pixels, so that no cell's border is blurred. */
  paint(pen, colours, ratio) {
    const { left, tall, wide } = this.grid;
    const { rows, values } = this.look;
    const edge = (at) => Math.round(at * ratio);
    for (const [row, line] of values.entries()) {
      const top = edge(tall * (rows.length - 1 - row));
      const bottom = edge(tall * (rows.length - row));
      for (const [column, value] of line.entries()) {
        const [from, to] = [edge(left + wide * column), edge(left + wide * (column + 1))];
        pen.fillStyle = colours(this.range.place(value));
        pen.fillRect(from, top, to - from, bottom - top);
      }
    }
  }

  name(pen) {
    const { left, tall } = this.grid;
    const { rows } = this.look;
    const every = Math.ceil((FONT + 1) / tall);
    pen.textAlign = "right";
    for (let row = 0; row < rows.length; row += every) {
      pen.fillText(rows[row], left - GAP, tall * (rows.length - row - 0.5));
    }
  }

  /** The tokens below the map, where all of them have room. */
  spell(pen) {
    const { left, tall, wide } = this.grid;
    const below = tall * this.look.rows.length + FONT / 2 + 4;
    pen.textAlign = "center";
    for (const [column, token] of this.tokens.entries()) pen.fillText(token, left + wide * (column + 0.5), below);
  }

  point(column) {
    if (column === this.column) return;
    this.column = column;
    this.draw();
  }

  /** A border around cells, from the top row down, within another one: on light cells and on dark ones. */
  frame(pen, style, row, column, rows) {
    const { left, tall, wide } = this.grid;
    for (const [name, lineWidth] of [["--card", 6], ["--ink", 2]]) {
      Object.assign(pen, { strokeStyle: style.getPropertyValue(name), lineWidth });
      pen.strokeRect(left + wide * column - 1, tall * (this.look.rows.length - 1 - row) - 1, wide + 2, tall * rows + 2);
    }
  }

  move(event) {
    const by = MOVES[event.key];
    if (!by || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault(); // the page does not scroll
    const last = [this.look.rows.length - 1, this.tokens.length - 1];
    const clamp = (at, most) => Math.min(most, Math.max(0, at));
    this.choose(this.chosen ? this.chosen.map((at, axis) => clamp(at + by[axis], last[axis])) : [0, last[1]]);
  }

  choose(cell) {
    this.chosen = cell;
    this.pointed(cell ? cell[1] : null);
    this.readout.setAttribute("aria-live", cell ? "polite" : "off"); // not each new answer's median
    this.rest();
    this.draw();
  }

  tell(event) {
    const { left, tall, wide } = this.grid;
    const column = Math.floor((event.offsetX - left) / wide);
    this.say(this.look.rows.length - 1 - Math.floor(event.offsetY / tall), column);
    this.pointed(this.tokens[column] === undefined ? null : column);
  }

  say(row, column) {
    const { rows, values, unit } = this.look;
    const value = values[row]?.[column];
    if (value === undefined) this.rest();
    else this.readout.textContent = `${JSON.stringify(this.tokens[column])}, ${rows[row]}: ${amount(value, unit)}`;
  }
}

/** The ends and the middle of a look's numbers, and where among them one stands, in [0, 1]. */
export function rangeOf({ values, log }) {
  const all = values.flat().sort((a, b) => a - b);
  const [low, middle, high] = [all[0], all[Math.floor(all.length / 2)], all.at(-1)];
  const least = log ? all.find((value) => value > 0) ?? 1 : low;
  const at = log ? (value) => Math.log(Math.max(value, least)) : (value) => value;
  const [from, to] = [at(low), at(high)];
  return { low, middle, high, place: (value) => (to > from ? (at(value) - from) / (to - from) : 0.5) };
}

/** From a place in [0, 1] to a colour of the style's --heat-0 to --heat-4. */
function heat(style) {
  const stops = [0, 1, 2, 3, 4].map((n) => rgb(style.getPropertyValue(`--heat-${n}`).trim()));
  return (place) => {
    const below = Math.min(stops.length - 2, Math.floor(place * (stops.length - 1)));
    const part = place * (stops.length - 1) - below;
    return `rgb(${stops[below].map((value, c) => Math.round(value + part * (stops[below + 1][c] - value))).join(" ")})`;
  };
}

const rgb = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));

export const number = (value) => Number(value.toPrecision(3)).toLocaleString("en", { maximumSignificantDigits: 3 });
const amount = (value, unit) => `${number(value)}${unit ? ` ${unit}` : ""}`;

function append(parent, tag, className = "") {
  const node = document.createElement(tag);
  node.className = className;
  parent.append(node);
  return node;
}
