// What a text is made of: prompt, seed, sampling, and for each column its model, temperature and dials; and its link.

import { Failure } from "./client.js";

const SHARED = ["seed", "max_tokens", "top_p", "top_k", "pace"];
const END = ["", ".b"]; // of a column's fields

/** {prompt, seed, ..., columns: [{model, temperature, start, control, turns}]} as the fragment of a link, without "#". */
export function toFragment({ prompt, columns, ...shared }) {
  const fields = new URLSearchParams({ prompt });
  const set = (name, value) => value !== undefined && value !== null && value !== "" && fields.set(name, value);
  for (const name of SHARED) set(name, shared[name]);
  for (const [index, column] of columns.entries()) {
    const end = END[index];
    set(`model${end}`, column.model);
    set(`temperature${end}`, column.temperature);
    set(`start${end}`, column.start);
    set(`dials${end}`, column.control && spelled(column.control));
    set(`turns${end}`, column.turns.map(({ at, control }) => `${at},${spelled(control)}`).join(";"));
  }
  // These letters need no escape in a fragment, and links are read by people.
  return fields.toString().replaceAll("%3A", ":").replaceAll("%2C", ",").replaceAll("%3B", ";");
}

/** The recipe of a link; null where the fragment is none. Throws Failure for a damaged one. */
export function fromFragment(fragment) {
  const fields = new URLSearchParams(fragment.replace(/^#/, ""));
  if (!fields.has("prompt")) return null;
  const recipe = { prompt: fields.get("prompt"), columns: [] };
  for (const name of SHARED) recipe[name] = numeral(fields, name);
  for (const end of END.filter((each) => each === "" || [...fields.keys()].some((name) => name.endsWith(each)))) {
    recipe.columns.push({
      model: fields.get(`model${end}`),
      temperature: numeral(fields, `temperature${end}`),
      start: fields.get(`start${end}`) ?? "",
      control: dialsOf(fields.get(`dials${end}`), `dials${end}`),
      turns: turnsOf(fields.get(`turns${end}`), `turns${end}`),
    });
  }
  return recipe;
}

const spelled = (control) => Object.entries(control).map(([name, value]) => `${encodeURIComponent(name)}:${value}`).join(",");

/** A field's number as it is spelled, "" where it is left out. */
function numeral(fields, name) {
  const value = fields.get(name) ?? "";
  if (value !== "") numberIn(value, name);
  return value;
}

function numberIn(value, field) {
  if (value !== "" && Number.isFinite(Number(value))) return Number(value);
  throw new Failure(400, `this link is damaged: its ${field} has ${JSON.stringify(value)} in the place of a number`);
}

function dialsOf(value, field) {
  if (value === null) return null;
  const pairs = value.split(",").map((pair) => pair.split(":"));
  return Object.fromEntries(pairs.map(([name, number = ""]) => [nameIn(name, field), numberIn(number, field)]));
}

function nameIn(text, field) {
  try {
    return decodeURIComponent(text);
  } catch {
    throw new Failure(400, `this link is damaged: its ${field} has ${JSON.stringify(text)} in the place of a name`);
  }
}

function turnsOf(value, field) {
  if (value === null) return [];
  return value.split(";").map((turn) => {
    const at = turn.indexOf(",");
    return { at: numberIn(turn.slice(0, Math.max(0, at)), field), control: dialsOf(turn.slice(at + 1), field) };
  });
}
