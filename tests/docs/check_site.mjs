// Looks at each page of the built site in Chromium, and prints what is wrong with it, a line each.
// node check_site.mjs NODE_MODULES URL FOLDER PAGE...   (the site is served at URL from FOLDER)
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [modules, url, folder, ...pages] = process.argv.slice(2);
const require = createRequire(pathToFileURL(`${modules}/`));
const puppeteer = require("puppeteer-core");
const axe = require.resolve("axe-core/axe.min.js");

const browser = await puppeteer.launch({
  executablePath: process.env.CHROMIUM,
  args: ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"],
  protocolTimeout: 300_000,
});

async function open(scheme) {
  const context = await browser.createBrowserContext();
  const page = await context.newPage();
  page.where = scheme;
  await page.emulateMediaFeatures([
    { name: "prefers-color-scheme", value: scheme },
    { name: "prefers-reduced-motion", value: "reduce" },
  ]);
  const wrong = (what) => console.log(`${page.where}: ${what}`);
  page.on("pageerror", (error) => wrong(`error: ${error.message ?? error}`));
  page.on("console", (message) => ["error", "warn"].includes(message.type()) && wrong(`console: ${message.text()}`));
  page.on("response", (answer) => answer.status() >= 400 && wrong(`status ${answer.status()}: ${answer.url()}`));
  page.on("request", (request) => {
    const inside = [url, "data:", "blob:", "about:", pathToFileURL(folder).href];
    if (!inside.some((start) => request.url().startsWith(start))) wrong(`request: ${request.url()}`);
  });
  return page;
}

async function checkLook(page, rules) {
  await page.addScriptTag({ path: axe });
  const options = { resultTypes: ["violations"], ...(rules && { runOnly: rules }) };
  const { violations } = await page.evaluate((given) => axe.run(given), options);
  for (const { id, help, nodes } of violations) {
    const first = nodes[0].html.slice(0, 160).replaceAll("\n", " ");
    console.log(`${page.where}: axe ${id}: ${help}: ${nodes.length} times, first ${first} ${nodes[0].failureSummary}`);
  }
}

async function checkWidth(page) {
  const over = await page.evaluate(() => document.documentElement.scrollWidth - window.innerWidth);
  if (over > 0) console.log(`${page.where}: ${over} pixels wider than the window`);
}

async function checkSearch(address, word, expected) {
  const page = await open("light");
  page.where = `search in ${address}`;
  await page.setViewport({ width: 1280, height: 900 });
  await page.goto(address);
  try {
    await page.click(".md-search__button");
    const input = await page.waitForSelector("pierce/input[role=combobox]", { timeout: 30_000, visible: true });
    await input.type(word);
    await page.waitForSelector(`pierce/a[role=option][href*="${expected}"]`, { timeout: 30_000 });
  } catch (error) {
    console.log(`${page.where}: ${word} is not found: ${error.message}`);
  }
  await page.close();
}

for (const scheme of ["light", "dark"]) {
  const page = await open(scheme);
  for (const name of pages) {
    await page.setViewport({ width: 1280, height: 900 });
    page.where = `${name}, ${scheme}`;
    await page.goto(`${url}/${name}`, { waitUntil: "load" });
    for (const width of [1280, 390]) {
      page.where = `${name}, ${scheme}, ${width} wide`;
      await page.setViewport({ width, height: 900 });
      await checkWidth(page);
      await checkLook(page, scheme === "dark" && ["color-contrast"]); // all else is the same in both
    }
  }
  await page.close();
}
await checkSearch(`${url}/index.html`, "fp32_modules", "how_to/pin_modules.html");
await checkSearch(`${pathToFileURL(folder).href}/index.html`, "fp32_modules", "how_to/pin_modules.html");
await browser.close();
