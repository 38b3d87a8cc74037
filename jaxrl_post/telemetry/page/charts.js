// Charts as SVG: lines of several runs, stacked bars, and histograms by step. They are drawn again when their width changes.

const LEFT = 50, RIGHT = 10, TOP = 8, BOTTOM = 22;

// Draws into a new box whenever its width changes. `draw(width)` returns [svg element, tip(x) -> {x, lines} or null].
function chart(height, label, draw) {
  const box = el("div", { class: "chart" });
  const tip = el("div", { class: "tip", hidden: "" });
  let told = () => null, cross = null, width = 0;
  const redraw = () => {
    const now = Math.round(box.clientWidth);
    if (!now || now === width) return;
    width = now;
    const [drawn, about] = draw(width);
    drawn.setAttribute("viewBox", `0 0 ${width} ${height}`);
    drawn.setAttribute("height", height);
    drawn.setAttribute("role", "img");
    drawn.setAttribute("aria-label", label);
    cross = svg("line", { class: "cross", y1: TOP, y2: height - BOTTOM, visibility: "hidden" });
    drawn.append(cross);
    box.replaceChildren(drawn, tip);
    told = about;
  };
  const hide = () => { tip.hidden = true; if (cross) cross.setAttribute("visibility", "hidden"); };
  box.addEventListener("pointermove", (event) => {
    const place = box.getBoundingClientRect();
    const found = told(event.clientX - place.left, event.clientY - place.top);
    if (!found) return hide();
    tip.replaceChildren(...found.lines);
    tip.hidden = false;
    cross.setAttribute("x1", found.x);
    cross.setAttribute("x2", found.x);
    cross.setAttribute("visibility", "visible");
    const left = found.x + 14 + tip.offsetWidth > width ? found.x - 14 - tip.offsetWidth : found.x + 14;
    tip.style.left = `${Math.max(0, left)}px`;
    tip.style.top = `${TOP}px`;
  });
  box.addEventListener("pointerleave", hide);
  new ResizeObserver(redraw).observe(box);
  return box;
}

// Axes: grid lines and numbers. Returns the element and the two scales.
function axes(width, height, x, y, labels) {
  const right = width - RIGHT, bottom = height - BOTTOM;
  const sx = (value) => LEFT + ((value - x[0]) / (x[1] - x[0] || 1)) * (right - LEFT);
  const sy = (value) => bottom - ((value - y[0]) / (y[1] - y[0] || 1)) * (bottom - TOP);
  const drawn = svg("svg", {});
  if (!labels) {
    for (const value of ticks(y[0], y[1], 4)) {
      drawn.append(svg("line", { class: "gridline", x1: LEFT, x2: right, y1: sy(value), y2: sy(value) }));
      drawn.append(svg("text", { x: LEFT - 6, y: sy(value) + 4, "text-anchor": "end" }, shown(value)));
    }
  }
  for (const value of ticks(x[0], x[1], Math.max(2, Math.floor(width / 90))).filter(Number.isInteger)) {
    const anchor = sx(value) > right - 12 ? "end" : "middle";
    drawn.append(svg("text", { x: Math.min(sx(value), right), y: bottom + 15, "text-anchor": anchor }, shown(value)));
  }
  drawn.append(svg("line", { class: "axis", x1: LEFT, x2: right, y1: bottom, y2: bottom }));
  return [drawn, sx, sy];
}

function bounds(values) {
  let low = Infinity, high = -Infinity;
  for (const value of values) if (value !== null) { low = Math.min(low, value); high = Math.max(high, value); }
  if (low === Infinity) return [0, 1];
  if (low > 0 && low < 0.5 * high) low = 0;
  const room = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
  return [low === 0 ? 0 : low - room, high + room];
}

const nearest = (points, x, of) => points.reduce((best, one) => (Math.abs(of(one) - x) < Math.abs(of(best) - x) ? one : best), points[0]);

// One metric of several runs. `lines`: [{run, name, points: [[step, value], ...]}].
function lineChart(lines, label, height = 170) {
  const all = lines.flatMap((line) => line.points);
  const x = [Math.min(...all.map((p) => p[0])), Math.max(...all.map((p) => p[0]))];
  const y = bounds(all.map((p) => p[1]));
  return chart(height, label, (width) => {
    const [drawn, sx, sy] = axes(width, height, x, y);
    for (const line of lines) {
      const path = line.points.map(([step, value], k) => `${k ? "L" : "M"}${sx(step).toFixed(1)} ${sy(value).toFixed(1)}`).join("");
      drawn.append(svg("path", { d: path, fill: "none", stroke: color(line.run), "stroke-width": 1.8, "stroke-linejoin": "round" }));
      if (line.points.length <= 16)
        for (const [step, value] of line.points) drawn.append(svg("circle", { cx: sx(step), cy: sy(value), r: 2.8, fill: color(line.run) }));
    }
    return [drawn, (at) => {
      const step = nearest(all, at, (p) => sx(p[0]))[0];
      const rows = lines.map((line) => {
        const found = nearest(line.points, at, (p) => sx(p[0]));
        return el("div", {}, swatch(line.run), lines.length > 1 ? line.name : "", found[0] === step ? "" : ` at ${found[0]}`, el("b", {}, shown(found[1])));
      });
      return { x: sx(step), lines: [el("div", {}, `step ${step}`), ...rows] };
    }];
  });
}

// Bars by step, each a stack of parts. `bars`: [{first, last, parts: [number, ...]}]; `names` and `colors` of the parts.
function stackChart(bars, names, colors, unit, label, height = 260) {
  const tops = bars.map((bar) => bar.parts.reduce((sum, one) => sum + one, 0));
  const first = bars[0].first, last = bars[bars.length - 1].last;
  return chart(height, label, (width) => {
    const [drawn, sx, sy] = axes(width, height, [first - 0.5, last + 0.5], [0, Math.max(...tops) * 1.04 || 1]);
    for (const bar of bars) {
      const left = sx(bar.first - 0.5), wide = sx(bar.last + 0.5) - left;
      const gap = wide > 5 ? 1.5 : 0;
      let under = 0;
      bar.parts.forEach((part, k) => {
        if (part > 0) drawn.append(svg("rect", { x: left, y: sy(under + part), width: Math.max(wide - gap, 0.5), height: Math.max(sy(under) - sy(under + part), 0), fill: color(colors[k]) }));
        under += part;
      });
    }
    return [drawn, (at) => {
      const bar = bars.find((one) => sx(one.first - 0.5) <= at && at < sx(one.last + 0.5));
      if (!bar) return null;
      const rows = names.map((name, k) => [name, bar.parts[k], colors[k]]).filter((row) => row[1] > 0);
      return {
        x: (sx(bar.first - 0.5) + sx(bar.last + 0.5)) / 2,
        lines: [el("div", {}, bar.first === bar.last ? `step ${bar.first}` : `steps ${bar.first} to ${bar.last}`),
          ...rows.map(([name, value, k]) => el("div", {}, swatch(k), name, el("b", {}, unit === "share" ? percent(value) : `${shown(value)} ${unit}`)))],
      };
    }];
  });
}

// Counts by step and bin, as shades. `edges`: the smallest value of each bin, and the end of the last one.
function heatChart(steps, edges, counts, label) {
  const bins = edges.length - 1, height = Math.max(150, bins * 20 + TOP + BOTTOM);
  const whole = counts.map((column) => column.reduce((sum, one) => sum + one, 0));
  const highest = Math.max(...counts.map((column, k) => Math.max(...column) / (whole[k] || 1)));
  const range = (bin) => (edges[bin + 1] - 1 > edges[bin] ? `${shown(edges[bin])}–${shown(edges[bin + 1] - 1)}` : shown(edges[bin]));
  return chart(height, label, (width) => {
    const [drawn, , sy] = axes(width, height, [0, 1], [0, bins], true);
    const wide = (width - RIGHT - LEFT) / steps.length;
    const every = Math.max(1, Math.ceil(steps.length / Math.max(2, Math.floor(width / 90))));
    drawn.querySelectorAll("text").forEach((one) => one.remove());
    for (let bin = 0; bin < bins; bin++) drawn.append(svg("text", { x: LEFT - 6, y: sy(bin + 0.5) + 4, "text-anchor": "end" }, range(bin)));
    steps.forEach((step, k) => {
      const left = LEFT + k * wide;
      if (k % every === 0) drawn.append(svg("text", { x: left + wide / 2, y: height - BOTTOM + 15, "text-anchor": "middle" }, shown(step)));
      counts[k].forEach((count, bin) => {
        if (!count) return;
        const shade = 0.08 + 0.92 * Math.sqrt(count / whole[k] / highest);
        drawn.append(svg("rect", { x: left, y: sy(bin + 1) + 0.5, width: Math.max(wide - (wide > 6 ? 1 : 0), 0.5), height: sy(bin) - sy(bin + 1) - 1, fill: `rgba(var(--low), ${shade.toFixed(3)})` }));
      });
    });
    return [drawn, (at, down) => {
      const k = Math.floor((at - LEFT) / wide), bin = bins - 1 - Math.floor(((down - TOP) / (height - TOP - BOTTOM)) * bins);
      if (k < 0 || k >= steps.length || bin < 0 || bin >= bins) return null;
      return { x: LEFT + (k + 0.5) * wide, lines: [el("div", {}, `step ${steps[k]}`), el("div", {}, `${range(bin)} tokens`, el("b", {}, `${counts[k][bin]} of ${whole[k]}, ${percent(counts[k][bin] / (whole[k] || 1))}`))] };
    }];
  });
}
