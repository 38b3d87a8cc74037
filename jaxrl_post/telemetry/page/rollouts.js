// The rollout browser: search, filters, and one rollout with its tokens shaded.

const LISTED = 200; // rollouts of the list

const SHADES = {
  logprob: ["log-prob", "-4 or less", "0"],
  entropy: ["entropy", "2 or more nats", "0"],
  version: ["weight version", "", ""],
  none: ["nothing", "", ""],
};

function versionAt(rollout, token) {
  let found = null;
  for (const [start, version] of rollout.versions) if (start <= token) found = version;
  return found;
}

// The background of a token. Unlikely tokens and high entropies are strong.
function shade(rollout, token, by) {
  if (by === "logprob") return `rgba(var(--bad), ${(0.75 * Math.min(1, Math.max(0, -(rollout.logprobs[token] ?? 0)) / 4)).toFixed(3)})`;
  if (by === "entropy") return `rgba(var(--low), ${(0.75 * Math.min(1, (rollout.entropies[token] ?? 0) / 2)).toFixed(3)})`;
  if (by === "version") {
    const known = rollout.versions.map((one) => one[1]), place = known.indexOf(versionAt(rollout, token));
    return `color-mix(in srgb, var(--s${place % 8}) 32%, transparent)`;
  }
  return "";
}

// Text with every place of `sought` (lower case) marked.
function marked(text, sought) {
  const out = [], low = text.toLowerCase();
  let from = 0;
  for (let at = sought ? low.indexOf(sought) : -1; at >= 0; at = low.indexOf(sought, from)) {
    out.push(text.slice(from, at), el("span", { class: "hit" }, text.slice(at, at + sought.length)));
    from = at + sought.length;
  }
  return [...out, text.slice(from)];
}

function tokenSpans(rollout, by, sought) {
  const whole = rollout.text.join("").toLowerCase(), hits = [];
  for (let at = sought ? whole.indexOf(sought) : -1; at >= 0; at = whole.indexOf(sought, at + sought.length)) hits.push([at, at + sought.length]);
  const drafted = new Set(rollout.drafted), forced = new Set(rollout.forced);
  let start = 0;
  return rollout.text.map((text, token) => {
    const end = start + text.length, hit = hits.some(([from, to]) => from < end && start < to);
    start = end;
    const classes = [hit && "hit", drafted.has(token) && "drafted", forced.has(token) && "forced"].filter(Boolean).join(" ");
    const told = [`token ${token + 1}: ${JSON.stringify(text)}`, `log-prob ${shown(rollout.logprobs[token])}, entropy ${shown(rollout.entropies[token])}`, `weights of version ${versionAt(rollout, token)}`,
      drafted.has(token) ? "an accepted draft" : "", forced.has(token) ? "not sampled" : ""].filter(Boolean).join("\n");
    return el("span", { class: classes, style: `background:${shade(rollout, token, by)}`, title: told }, text);
  });
}

function scaleOf(rollout, by) {
  const [name, strong, weak] = SHADES[by];
  if (by === "none") return [];
  if (by === "version") return rollout.versions.map(([, version], k) => el("span", { class: "scale" }, swatch(k % 8), `version ${version}`));
  const hue = by === "logprob" ? "--bad" : "--low";
  return [el("span", { class: "scale" }, weak, el("i", { style: `background:linear-gradient(90deg, transparent, rgba(var(${hue}), .75))` }), `${strong} (${name})`)];
}

function drawDetail(place, rollout, by, sought, runs) {
  const fact = (name, value) => el("div", {}, el("span", {}, name), value);
  const versions = [...new Set(rollout.versions.map((one) => one[1]))];
  const facts = [
    ...(runs.length > 1 ? [fact("run", runs[rollout.run].name)] : []),
    fact("step", `${shown(rollout.step)}, ${rollout.kind}`), fact("reward", rollout.reward === null ? "no score" : shown(rollout.reward)),
    ...Object.entries(rollout.parts).map(([name, value]) => fact(name, shown(value))),
    fact("length", `${shown(rollout.length)} tokens`), fact("finish", rollout.finish), fact("weight versions", versions.join(", ") || "–"),
    fact("drafted tokens", shown(rollout.drafted.length)), fact("prompt", `${rollout.id}, rollout ${rollout.sample}`), fact("engine steps", rollout.clock.map(shown).join(" to ")),
  ];
  const cut = rollout.length - rollout.text.length;
  place.replaceChildren(
    el("div", { class: "facts-grid" }, facts),
    el("h3", {}, "Prompt"), el("div", { class: "text" }, marked(rollout.prompt, sought)),
    el("h3", {}, "Rollout"), el("div", { class: "bar" }, scaleOf(rollout, by), rollout.drafted.length ? el("span", { class: "scale" }, "underlined: accepted drafts") : null),
    el("div", { class: "text" }, tokenSpans(rollout, by, sought)),
    cut > 0 ? el("p", { class: "note" }, `${shown(cut)} more tokens are in the rollout log.`) : "",
    ...(rollout.truth ? [el("h3", {}, "Ground truth"), el("div", { class: "text" }, rollout.truth)] : []));
}

function drawBrowser(runs) {
  const place = document.getElementById("browser");
  const all = runs.flatMap((run, index) => run.rollouts.map((one) => ({ ...one, run: index, found: `${one.prompt}\u0000${one.text.join("")}`.toLowerCase() })));
  for (const run of runs) {
    const counts = Object.keys(run.rule.shown).map((kind) => `${shown(run.rule.shown[kind])} of ${shown(run.rule.all[kind])} ${kind} rollouts`).join(", ");
    place.append(el("p", { class: "note" }, `${runs.length > 1 ? `${run.name}: ` : ""}${counts}: ${run.rule.rule}.${run.decoded ? "" : " No tokenizer was found, so tokens are shown by their ids."}`));
  }
  if (!all.length) return place.append(el("p", { class: "empty" }, "No rollouts are logged."));
  const state = { sought: "", run: "", step: "", kind: "", order: "step", by: "logprob", chosen: null };
  const list = el("ol", {}), count = el("p", { class: "note", id: "found", "aria-live": "polite" }), detail = el("div", { class: "card" });
  const show = (rollout) => { state.chosen = rollout; if (rollout) drawDetail(detail, rollout, state.by, state.sought, runs); else detail.replaceChildren(el("p", { class: "empty" }, "No rollout matches.")); };
  const orders = { step: (a, b) => a.step - b.step, reward: (a, b) => (a.reward ?? -Infinity) - (b.reward ?? -Infinity), better: (a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity), length: (a, b) => b.length - a.length };
  const update = () => {
    const found = all.filter((one) => (!state.sought || one.found.includes(state.sought)) && (state.run === "" || one.run === Number(state.run)) && (state.step === "" || one.step === Number(state.step)) && (!state.kind || one.kind === state.kind)).sort(orders[state.order]);
    count.textContent = `${shown(found.length)} of ${shown(all.length)} rollouts match.${found.length > LISTED ? ` The first ${LISTED} are listed.` : ""}`;
    const buttons = found.slice(0, LISTED).map((one) => el("button", { type: "button", onclick: (event) => {
      list.querySelectorAll("[aria-current]").forEach((other) => other.removeAttribute("aria-current"));
      event.currentTarget.setAttribute("aria-current", "true");
      show(one);
    } }, el("span", { class: "facts" }, runs.length > 1 ? swatch(one.run) : "", `${runs.length > 1 ? " " : ""}step ${one.step}${one.kind === "evaluation" ? ", evaluation" : ""} · ${shown(one.length)} tokens`), el("span", { class: "reward" }, one.reward === null ? "no score" : shown(one.reward)),
    el("span", { class: "start" }, `${one.prompt.slice(-60)} → ${one.text.join("").slice(0, 120)}`)));
    list.replaceChildren(...buttons.map((button) => el("li", {}, button)));
    if (buttons.length) buttons[0].setAttribute("aria-current", "true");
    show(found[0] || null);
  };
  const set = (name) => (value) => { state[name] = value; update(); };
  const search = el("input", { type: "search", id: "search", placeholder: "Search prompts and rollouts", "aria-label": "Search prompts and rollouts", oninput: () => set("sought")(search.value.toLowerCase()) });
  const steps = [...new Set(all.map((one) => one.step))].sort((a, b) => a - b);
  place.append(el("div", { class: "bar" }, el("label", { class: "wide" }, search),
    ...(runs.length > 1 ? [choice("run", [["", "all"], ...runs.map((run, k) => [k, run.name])], set("run"))[0]] : []),
    choice("step", [["", "all"], ...steps.map((step) => [step, step])], set("step"))[0],
    choice("from", [["", "both"], ["training", "training"], ["evaluation", "evaluation"]], set("kind"))[0],
    choice("order", [["step", "by step"], ["reward", "lowest reward"], ["better", "highest reward"], ["length", "longest"]], set("order"))[0],
    choice("shade by", Object.entries(SHADES).map(([key, told]) => [key, told[0]]), (value) => { state.by = value; show(state.chosen); })[0]),
    count, el("div", { class: "browser" }, el("div", { class: "card list" }, list), detail));
  update();
}
