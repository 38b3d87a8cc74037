// Reads the data and draws the page.

const RUNS = JSON.parse(document.getElementById("data").textContent).runs;

// A section that shows one run at a time, with a choice where there are several.
function byRun(id, draw) {
  const place = document.getElementById(id), inside = el("div", {});
  const redraw = (index) => { inside.replaceChildren(); draw(RUNS[index], Number(index), inside); };
  if (RUNS.length > 1) place.append(el("div", { class: "bar" }, choice("run", RUNS.map((run, k) => [k, run.name]), redraw)[0]));
  place.append(inside);
  redraw(0);
}

document.getElementById("title").textContent = RUNS.map((run) => run.name).join(" · ");
const versions = RUNS[0].derived.versions || {};
document.getElementById("subtitle").textContent = [`jaxrl_post ${versions.jaxrl_post || ""}`, versions.jax ? `jax ${versions.jax}` : "", `seed ${RUNS.map((run) => run.config.seed).join(", ")}`].filter(Boolean).join(" · ");
drawSummary(RUNS);
drawCurves(RUNS);
byRun("time", (run, index, place) => drawTime(run, place));
byRun("lengths", (run, index, place) => drawLengths(run, place));
byRun("staleness", drawStaleness);
drawBrowser(RUNS);
byRun("about", (run, index, place) => drawAbout(run, place));
document.documentElement.dataset.drawn = "yes";
