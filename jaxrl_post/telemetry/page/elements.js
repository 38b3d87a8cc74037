"use strict";
// Elements of the page. Texts of a run only ever become text contents or attribute values.

function el(name, given, ...children) {
  const made = document.createElement(name);
  fill(made, given, children);
  return made;
}

function svg(name, given, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  fill(made, given, children);
  return made;
}

function fill(made, given, children) {
  for (const [key, value] of Object.entries(given || {})) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (key === "style") made.style.cssText = value;
    else if (value !== null && value !== undefined) made.setAttribute(key, value);
  }
  for (const child of children.flat()) if (child !== null && child !== undefined) made.append(child);
}

const color = (index) => `var(--s${index})`;
const swatch = (index) => el("i", { class: "swatch", style: `background:${color(index)}` });

// A number as a person reads it: 4 significant digits, thousands apart.
function shown(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  const size = Math.abs(value);
  if (size !== 0 && (size < 0.001 || size >= 1e9)) return value.toExponential(2);
  if (Number.isInteger(value) || size >= 10000) return Math.round(value).toLocaleString("en-US");
  return String(Number(value.toPrecision(4)));
}

const percent = (share) => `${(100 * share).toFixed(share < 0.0995 ? 1 : 0)} %`;

// Round values between two ends, about `count` of them.
function ticks(low, high, count) {
  const span = high - low || 1;
  const rough = span / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * ([1, 2, 5, 10].find((one) => one * power >= rough * 0.999) || 10);
  const out = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + 1e-9 * span; k++) out.push(Number((k * step).toPrecision(12)));
  return out;
}

function choice(label, options, change, wide) {
  const made = el("select", { onchange: () => change(made.value) }, options.map(([value, text]) => el("option", { value }, text)));
  return [el("label", { class: wide ? "wide" : "" }, label, made), made];
}
