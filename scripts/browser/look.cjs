// node look.cjs PAGE PLANTED OUT: opens a page in headless Chromium, takes screenshots, and prints findings as JSON. A page with a
// search, as report.html has one, is searched for PLANTED.
// JAXRL_BROWSER names the folder in which puppeteer-core and @sparticuz/chromium are installed; CHROME another Chromium.

const path = require("path");
const { pathToFileURL } = require("url");

const modules = require("module").createRequire(path.join(process.env.JAXRL_BROWSER, "here.js"));
const load = async (name) => (await import(pathToFileURL(modules.resolve(name)).href)).default;
const SIZES = { desktop: { width: 1280, height: 900 }, phone: { width: 390, height: 844, isMobile: true, hasTouch: true, deviceScaleFactor: 2 } };

// Runs in the page: labels that overlap or are cut, charts without marks, and images that were not drawn.
function inspected() {
  const labels = [...document.querySelectorAll(".chart svg")].map((svg) => [...svg.querySelectorAll("text")].map((text) => text.getBoundingClientRect()));
  const cross = (a, b) => a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 1 && b.top < a.bottom - 1;
  const overlapping = labels.flatMap((boxes) => boxes.flatMap((a, k) => boxes.slice(k + 1).filter((b) => cross(a, b)))).length;
  const cut = [...document.querySelectorAll(".chart svg")].flatMap((svg) => {
    const card = svg.closest(".card").getBoundingClientRect();
    return [...svg.querySelectorAll("text")].map((text) => text.getBoundingClientRect()).filter((box) => box.left < card.left || box.right > card.right);
  }).length;
  const charts = [...document.querySelectorAll(".chart")];
  const empty = charts.filter((chart) => !chart.querySelector("svg path, svg rect, svg circle")).length;
  const broken = [...document.querySelectorAll(".chart svg *")].filter((one) => [...one.attributes].some((given) => given.value.includes("NaN"))).length;
  const images = [...document.images];
  const undrawn = images.filter((image) => !image.complete || image.naturalWidth === 0).length;
  return { drawn: document.documentElement.dataset.drawn === "yes", charts: charts.length, empty, broken, overlapping, cut,
    images: images.length, undrawn, undescribed: images.filter((image) => /^(No description|$)/.test(image.alt)).length, tables: document.querySelectorAll("table").length,
    overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth };
}

async function searched(page, planted) {
  await page.$eval("#search", (box, text) => { box.value = text; box.dispatchEvent(new Event("input")); }, planted);
  return page.evaluate((text) => ({ says: document.getElementById("found").textContent, listed: document.querySelectorAll(".list li").length,
    marked: [...document.querySelectorAll("#browser .text .hit")].map((one) => one.textContent).join(""),
    shown: document.getElementById("browser").textContent.includes(text) }), planted);
}

async function main([file, planted, out]) {
  const [puppeteer, chromium] = await Promise.all([load("puppeteer-core"), load("@sparticuz/chromium")]);
  const own = { executablePath: process.env.CHROME, args: ["--no-sandbox"] };
  const browser = await puppeteer.launch({ headless: "shell", ...(process.env.CHROME ? own : { executablePath: await chromium.executablePath(), args: chromium.args }) });
  const told = { browser: await browser.version(), errors: [], requests: [] };
  for (const [name, viewport] of Object.entries(SIZES)) {
    for (const scheme of ["light", "dark"]) {
      const page = await browser.newPage();
      page.on("console", (message) => message.type() !== "log" && told.errors.push(message.text()));
      page.on("pageerror", (error) => told.errors.push(String(error)));
      page.on("request", (request) => told.requests.push(request.url().slice(0, 80)));
      await page.setViewport(viewport);
      await page.emulateMediaFeatures([{ name: "prefers-color-scheme", value: scheme }]);
      await page.goto(pathToFileURL(path.resolve(file)).href, { waitUntil: "load" });
      await page.evaluate(() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done))));
      if (scheme === "light") told[name] = await page.evaluate(inspected);
      await page.screenshot({ path: path.join(out, `${name}_${scheme}.png`), fullPage: true });
      if (scheme === "light") {
        await page.screenshot({ path: path.join(out, `${name}_top.png`) });
        if (await page.$("#search")) {
          told[name].search = await searched(page, planted);
          await (await page.$("#browser")).screenshot({ path: path.join(out, `${name}_search.png`) });
        }
      }
      await page.close();
    }
  }
  await browser.close();
  console.log(JSON.stringify(told));
}

main(process.argv.slice(2)).catch((error) => { console.error(String(error)); process.exit(1); });
