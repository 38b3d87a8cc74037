// The sections of the page, except the rollout browser.

const CURVES = [
  ["Reward, mean", "critic/score/mean"],
  ["Response length, mean (tokens)", "response_length/mean"],
  ["Response length, longest (tokens)", "response_length/max"],
  ["Share cut at the limit", "response_length/clip_ratio"],
  ["Entropy (nats)", "actor/entropy"],
  ["Gradient norm", "actor/grad_norm"],
  ["Loss", "actor/pg_loss"],
  ["KL to the policy before the update", "actor/ppo_kl"],
  ["KL to the reference", "actor/kl_loss"],
  ["KL between engine and learner", "rollout_corr/k3_kl"],
  ["Share of groups with equal rewards", "frac_reward_zero_std"],
  ["Trained tokens per second and device", "perf/throughput"],
];
const OPEN = ["environment", "summary", "run"]; // cards that are open at first
const PARTS = ["generating", "training", "idle rows", "rows held empty by the bound", "rows computed again", "drafts that failed", "rewards", "evaluation"];

// [step, value] of a metric, without steps that lack it.
function pointsOf(run, name) {
  const values = run.curves.metrics[name];
  return values ? run.curves.steps.map((step, k) => [step, values[k]]).filter((point) => point[1] !== null) : [];
}

function linesOf(runs, name) {
  return runs.map((run, index) => ({ run: index, name: run.name, points: pointsOf(run, name) })).filter((line) => line.points.length);
}

function curveCard(runs, title, name) {
  const lines = linesOf(runs, name);
  return lines.length ? el("div", { class: "card" }, el("h3", { title: name }, title), lineChart(lines, `${title} by step`)) : null;
}

function drawSummary(runs) {
  const place = document.getElementById("summary");
  runs.forEach((run, index) => {
    if (runs.length > 1) place.append(el("div", { class: "run-head" }, swatch(index), run.name));
    place.append(el("div", { class: "tiles" }, tilesOf(run).map(([name, value, more]) =>
      el("div", { class: "card" }, el("div", { class: "tile-name" }, name), el("div", { class: "tile-value" }, value), el("div", { class: "tile-more" }, more || "")))));
  });
}

function tilesOf(run) {
  const told = run.summary, out = [];
  const rewards = pointsOf(run, "critic/score/mean");
  const before = (told.eval || {}).before, after = (told.eval || {}).after;
  if (before && after) {
    const sampled = Object.keys(after).find((name) => name.startsWith("mean_at_"));
    if (after.greedy !== undefined) out.push(["Held out, greedy", shown(after.greedy), `${shown(before.greedy)} before`]);
    if (sampled) out.push([`Held out, mean of ${sampled.slice(8)}`, shown(after[sampled]), `${shown(before[sampled])} before`]);
  }
  if (rewards.length) out.push(["Training reward", shown(rewards[rewards.length - 1][1]), `${shown(rewards[0][1])} at step ${rewards[0][0]}`]);
  const last = run.curves.steps[run.curves.steps.length - 1];
  out.push(["Optimizer steps", shown(told.steps === undefined ? last : told.steps), told.steps === undefined ? "the run has not ended" : `of ${shown(run.config.steps)}`]);
  if (told.tokens !== undefined) out.push([run.config.engine && run.config.engine.name !== "rows" ? "Trained tokens" : "Sampled tokens", shown(told.tokens), "for training"]);
  if (told.seconds !== undefined) out.push(["Seconds", shown(told.seconds), "with compilation, since the last start"]);
  const shares = run.times.shares;
  const useful = (shares.generating || 0) + (shares.training || 0);
  if (useful) out.push(["Useful device time", percent(useful), "generating and training"]);
  out.push(["Device", `${shown(told.devices || run.derived.devices || 1)} × ${told.device || run.derived.device || "?"}`, `${shown(told.processes || run.derived.processes || 1)} process(es)`]);
  return out;
}

function drawCurves(runs) {
  const place = document.getElementById("curves");
  if (runs.length > 1) place.append(el("div", { class: "legend" }, runs.map((run, index) => el("span", {}, swatch(index), run.name))));
  const all = [...new Set(runs.flatMap((run) => Object.keys(run.curves.metrics)))].sort();
  const held = all.filter((name) => name.startsWith("val-core/") || (name.startsWith("val-aux/") && (name.endsWith("/greedy") || name.endsWith("response_length/mean"))));
  const grid = el("div", { class: "grid" });
  const own = [CURVES[0], ...held.map((name) => [`Held out: ${name.split("/").slice(1).join(" ")}`, name]), ...CURVES.slice(1)];
  for (const [title, name] of own) grid.append(...[curveCard(runs, title, name)].filter(Boolean));
  place.append(el("p", { class: "note" }, "By optimizer step. Point at a chart to read its values."), grid);
  const more = el("div", { class: "grid" });
  const [label, select] = choice("Another metric", [["", "choose one of all"], ...all.map((name) => [name, name])], (name) => {
    const card = name && curveCard(runs, name, name);
    if (card) more.prepend(card);
    select.value = "";
  }, true);
  const thin = runs.filter((run) => run.curves.all > run.curves.steps.length).map((run) => `${run.name}: ${run.curves.steps.length} of ${run.curves.all} steps are drawn, evenly spaced.`);
  place.append(el("div", { class: "bar", style: "margin-top:12px" }, label), more, ...thin.map((text) => el("p", { class: "note" }, text)));
}

function drawTime(run, place) {
  const { first, last, seconds, shares } = run.times;
  if (!first.length) return place.append(el("p", { class: "empty" }, "No step has been timed yet."));
  const named = PARTS.filter((name) => shares[name]), rest = Object.keys(shares).filter((name) => !PARTS.includes(name));
  const bars = first.map((step, k) => ({
    first: step, last: last[k],
    parts: [...named.map((name) => seconds[name][k]), rest.reduce((sum, name) => sum + seconds[name][k], 0)],
  }));
  const names = [...named, "everything else"], colors = [...named.map((name) => PARTS.indexOf(name)), 8];
  const whole = bars.reduce((sum, bar) => sum + bar.parts.reduce((one, part) => one + part, 0) * (bar.last - bar.first + 1), 0);
  const rows = Object.entries(shares).sort((a, b) => b[1] - a[1]).map(([name, share]) =>
    el("tr", {}, el("td", {}, swatch(PARTS.includes(name) ? PARTS.indexOf(name) : 8), ` ${name === "else" ? "outside all parts" : name}`), el("td", { class: "number" }, percent(share)), el("td", { class: "number" }, shown(share * whole))));
  place.append(el("div", { class: "two" },
    el("div", { class: "card" }, el("h3", {}, "Seconds of a step, by part"), stackChart(bars, names, colors, "s", "Seconds of a step by part of the time")),
    el("div", { class: "card" }, el("table", {}, el("thead", {}, el("tr", {}, el("th", {}, "part"), el("th", { class: "number" }, "share"), el("th", { class: "number" }, "seconds"))), el("tbody", {}, rows)))));
  if (first.some((step, k) => last[k] > step)) place.append(el("p", { class: "note" }, "A bar is the mean of neighbouring steps."));
}

function drawLengths(run, place) {
  const { steps, edges, counts, all } = run.lengths;
  if (!steps.length) return place.append(el("p", { class: "empty" }, "No rollouts are logged."));
  place.append(el("div", { class: "card" }, el("h3", {}, "Training rollouts: tokens by step"), heatChart(steps, edges, counts, "Histogram of rollout lengths by step")),
    el("p", { class: "note" }, `A stronger cell holds a larger share of the step's rollouts.${steps.length < all ? ` ${steps.length} of ${all} steps are drawn, evenly spaced.` : ""}`));
}

function drawStaleness(run, index, place) {
  const ages = Object.keys(run.curves.metrics).filter((name) => /^off_policy\/share_\d+$/.test(name)).map((name) => Number(name.split("_").pop())).sort((a, b) => a - b);
  const mean = pointsOf(run, "off_policy/mean");
  if (!mean.length) return place.append(el("p", { class: "empty" }, "No step has been trained yet."));
  if (!ages.length) return place.append(el("p", { class: "note" }, "Every token was sampled with the weights that it then trained: the run is on-policy."));
  const shown = [...ages.filter((age) => age <= 6)], older = ages.filter((age) => age > 6);
  const value = (age, k) => { const v = run.curves.metrics[`off_policy/share_${age}`]; return (v && v[k]) || 0; };
  const steps = run.curves.steps.map((step, k) => [step, k]).filter(([, k]) => run.curves.metrics["off_policy/mean"][k] !== null);
  const bars = steps.map(([step, k], n) => ({
    first: n ? steps[n - 1][0] + 1 : step, last: step,
    parts: ages.some((age) => value(age, k)) ? [...shown.map((age) => value(age, k)), ...(older.length ? [older.reduce((sum, age) => sum + value(age, k), 0)] : [])] : [1],
  }));
  const names = [...shown.map((age) => (age === 1 ? "1 step old" : `${age} steps old`)), ...(older.length ? ["older"] : [])];
  const colors = names.map((_, k) => (k < 7 ? k : 8));
  for (const bar of bars) while (bar.parts.length < names.length) bar.parts.push(0);
  place.append(el("div", { class: "two" },
    el("div", { class: "card" }, el("h3", {}, "Trained tokens by age of their weights"), el("div", { class: "legend" }, names.map((name, k) => el("span", {}, swatch(colors[k]), name))),
      stackChart(bars, names, colors, "share", "Share of trained tokens by age", 220)),
    el("div", { class: "card" }, el("h3", {}, "Age of a token, mean (steps)"), lineChart([{ run: index, name: run.name, points: mean }], "Mean age by step"),
      el("h3", {}, "Oldest token (steps)"), lineChart([{ run: index, name: run.name, points: pointsOf(run, "off_policy/max") }], "Oldest token by step", 120))));
}

function drawAbout(run, place) {
  const flat = (value, name, out) => {
    if (value !== null && typeof value === "object" && !Array.isArray(value) && Object.keys(value).length)
      for (const [key, inner] of Object.entries(value)) flat(inner, name ? `${name}.${key}` : key, out);
    else out.push([name, typeof value === "string" ? value || "(empty)" : JSON.stringify(value)]);
    return out;
  };
  const card = (title, value) => el("details", { class: "card", ...(OPEN.includes(title) ? { open: "" } : {}) }, el("summary", {}, title), el("table", {}, el("tbody", {}, flat(value, "", []).map(([key, text]) => el("tr", {}, el("td", {}, key), el("td", {}, text))))));
  const top = Object.fromEntries(Object.entries(run.config).filter(([, value]) => value === null || typeof value !== "object"));
  const sections = Object.entries(run.config).filter(([, value]) => value !== null && typeof value === "object");
  const { eval: _, device_time: __, versions, ...figures } = run.summary;
  const environment = { ...run.derived, ...(versions ? { versions } : {}) };
  const cards = [["environment", environment], ["summary", figures], ["run", top], ...sections];
  place.append(el("div", { class: "about" }, cards.filter(([, value]) => Object.keys(value).length).map(([name, value]) => card(name, value))));
}
