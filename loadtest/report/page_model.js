/* Speculation under load: what each policy makes of a measured machine and drafter.
   The same computation as page_reference.py, which says what the policies are; a test compares the
   two. Pure functions of the data that page_model.py writes; nothing here touches the document. */
"use strict";

function sigmoid(x) { return 1 / (1 + Math.exp(-x)); }

/** Fractional part of a non-negative number. */
function frac(x) { return x - Math.floor(x); }

/** Logistic variable of mean 0 and variance 1 at probability u. */
function standard(u) { return Math.sqrt(3) / Math.PI * Math.log(u / (1 - u)); }

/** What request `who` adds to the mean logits at `age`. */
function deviation(model, who, age, spread) {
  const c = model.constants;
  const level = standard(frac((who + 0.5) * c.sequences[1]));
  const step = standard(frac((who * c.ages + age + 0.5) * c.sequences[2]));
  return spread * (Math.sqrt(c.between) * level + Math.sqrt(1 - c.between) * step);
}

/** mu_k: [gamma], such that the population's mean survivals are `survival`. */
function meanLogits(model, survival, spread) {
  const c = model.constants, around = [];
  for (let who = 0; who < c.population; who++) {
    for (let age = 0; age < c.ages; age++) around.push(deviation(model, who, age, spread));
  }
  const running = around.map(() => 1);
  return survival.map((target) => {
    let low = -c.limit, high = c.limit;
    for (let i = 0; i < c.halvings; i++) {
      const middle = (low + high) / 2;
      let sum = 0;
      for (let j = 0; j < around.length; j++) sum += running[j] * sigmoid(middle + around[j]);
      if (sum / around.length < target) low = middle; else high = middle;
    }
    const found = (low + high) / 2;
    for (let j = 0; j < around.length; j++) running[j] *= sigmoid(found + around[j]);
    return found;
  });
}

/** Domains of a workload with their shares, mean logits and mean conditional acceptance. */
function domainsOf(model, workload, spread) {
  const names = workload === "mix" ? Object.keys(model.workloads) : [workload];
  const total = names.reduce((sum, name) => sum + model.workloads[name].share, 0);
  return names.map((name) => {
    const { share, survival } = model.workloads[name];
    const usual = survival.map((a, k) => {
      const before = k ? survival[k - 1] : 1;
      return before > 0 ? a / before : 0;
    });
    return { share: share / total, logits: meanLogits(model, survival, spread), usual };
  });
}

/** The domain that request `who` belongs to. */
function domainOf(model, domains, who) {
  const u = frac((who + 0.5) * model.constants.sequences[0]);
  let edge = 0;
  for (let i = 0; i < domains.length - 1; i++) {
    edge += domains[i].share;
    if (u < edge) return domains[i];
  }
  return domains[domains.length - 1];
}

/** A step's drafts: confidence and gains [R * gamma] row by row, and their order (see `ranked`). */
function batch(confidence, gamma) {
  const gains = new Float32Array(confidence.length);
  for (let i = 0; i < confidence.length; i++) {
    gains[i] = i % gamma ? gains[i - 1] * confidence[i] : confidence[i];
  }
  return { confidence, gains, order: ranked(gains, gamma) };
}

/** Keys of all drafts, ascending: gain, then (reversed) position, then (reversed) row. Gains are
    not negative, so their bits order like them; 30 bits of gain and 20 of place are exact. */
function ranked(gains, gamma) {
  const bits = new Int32Array(gains.buffer), keys = new Float64Array(gains.length);
  for (let i = 0; i < keys.length; i++) {
    keys[i] = bits[i] * PLACES + (PLACES - 1 - (i % gamma) * ROWS - Math.floor(i / gamma));
  }
  return keys.sort();
}

/** Position and row in a key. */
function placeOf(key) { return PLACES - 1 - key % PLACES; }
const ROWS = 1 << 15, PLACES = 1 << 20;

const prepared = new Map();

/** A value kept under a name; all are dropped when there are many. */
function kept(name, make) {
  if (!prepared.has(name)) {
    if (prepared.size > 400) prepared.clear();
    prepared.set(name, make());
  }
  return prepared.get(name);
}

/** Generations of requests: {usual, steps: [ages]}, all of them batches. */
function generationsOf(model, choice) {
  const { requests, workload, spread } = choice, { ages, population } = model.constants;
  const gamma = model.gamma;
  const domains = kept(`domains ${workload} ${spread}`, () => domainsOf(model, workload, spread));
  const count = Math.max(2, Math.ceil(population / requests));
  return Array.from({ length: count }, (_, generation) => {
    const usual = new Float32Array(requests * gamma);
    const steps = Array.from({ length: ages }, () => new Float32Array(requests * gamma));
    for (let r = 0; r < requests; r++) {
      const who = generation * requests + r, domain = domainOf(model, domains, who);
      usual.set(domain.usual, r * gamma);
      steps.forEach((confidence, age) => {
        const around = deviation(model, who, age, spread);
        confidence.set(domain.logits.map((mu) => sigmoid(mu + around)), r * gamma);
      });
    }
    return { usual: batch(usual, gamma), steps: steps.map((each) => batch(each, gamma)) };
  });
}

/** Verify lengths when the K best drafts of the first `depth` positions are admitted. */
function admit(step, rows, drafts, depth) {
  const lengths = new Int32Array(rows);
  for (let i = step.order.length - 1, left = drafts; i >= 0 && left > 0; i--) {
    const place = placeOf(step.order[i]);
    if (place < depth * ROWS) {
      lengths[place % ROWS] += 1;
      left -= 1;
    }
  }
  return lengths;
}

/** The gain of the draft at a place. */
function gainAt(step, place, gamma) {
  return step.gains[(place % ROWS) * gamma + Math.floor(place / ROWS)];
}

/** K and depth of the best Theta over all K and depths, none included. */
function search(step, rows, costs, gamma) {
  let best = { drafts: 0, depth: 0, tau: rows, seconds: costs.tokens[rows] + costs.fixed + costs.draft[0] };
  for (let depth = 1; depth <= gamma; depth++) {
    if (depth < gamma && costs.draft[depth] >= costs.draft[depth + 1]) continue;
    const fixed = costs.fixed + costs.draft[depth];
    let drafts = 0, tau = rows;
    for (let i = step.order.length; i >= 0; i--) {
      if (i < step.order.length) {
        const place = placeOf(step.order[i]);
        if (place >= depth * ROWS) continue;
        tau += gainAt(step, place, gamma);
        drafts += 1;
      }
      const seconds = costs.tokens[rows + drafts] + fixed;
      if (tau * best.seconds > best.tau * seconds) best = { drafts, depth, tau, seconds };
    }
  }
  return best;
}

/** Algorithm 1: K at the first drop of Theta over the present step. */
function earlyStop(step, rows, costs, gamma) {
  const fixed = costs.fixed + costs.draft[gamma];
  let tau = rows, seconds = costs.tokens[rows] + fixed, drafts = 0;
  for (let i = step.order.length - 1; i >= 0; i--) {
    const nextTau = tau + gainAt(step, placeOf(step.order[i]), gamma);
    const nextSeconds = costs.tokens[rows + drafts + 1] + fixed;
    if (nextTau * seconds < tau * nextSeconds) break;
    tau = nextTau; seconds = nextSeconds; drafts += 1;
  }
  return drafts;
}

/** Drafts of each row while their confidence is above the threshold. */
function above(step, rows, threshold, gamma) {
  return Int32Array.from({ length: rows }, (_, r) => {
    let length = 0;
    while (length < gamma && step.confidence[r * gamma + length] > threshold) length += 1;
    return length;
  });
}

/** Verify lengths and drafted depth of a step. lagged: the step that the plan may know. */
function decide(choice, step, lagged, costs, gamma) {
  const rows = choice.requests;
  if (choice.policy === "plain") return { lengths: new Int32Array(rows), depth: 0 };
  if (choice.policy === "fixed") {
    return { lengths: new Int32Array(rows).fill(choice.length), depth: choice.length };
  }
  if (choice.policy === "static") {
    return { lengths: above(step, rows, choice.threshold, gamma), depth: gamma };
  }
  if (choice.policy === "algorithm1") {
    return { lengths: admit(step, rows, earlyStop(step, rows, costs, gamma), gamma), depth: gamma };
  }
  const { drafts, depth } = search(lagged, rows, costs, gamma);
  return { lengths: admit(step, rows, drafts, depth), depth };
}

/** What a policy makes of a load. choice: {workload, policy, requests, length, threshold, spread}. */
function outcome(model, choice) {
  const { requests, workload, spread } = choice, gamma = model.gamma;
  const costs = { tokens: model.tokens, fixed: requests * model.per_request, draft: model.draft[requests - 1] };
  const generations = kept(`load ${workload} ${requests} ${spread}`, () => generationsOf(model, choice));
  let tokens = 0, seconds = 0, drafts = 0, skipped = 0, steps = 0;
  for (const generation of generations) {
    generation.steps.forEach((step, age) => {
      const lagged = age >= 2 ? generation.steps[age - 2] : generation.usual;
      const { lengths, depth } = decide(choice, step, lagged, costs, gamma);
      let verified = 0, expected = 0;
      for (let r = 0; r < requests; r++) {
        verified += lengths[r];
        for (let j = 0; j < lengths[r]; j++) expected += step.gains[r * gamma + j];
      }
      tokens += requests + expected;
      seconds += costs.tokens[requests + verified] + costs.fixed + costs.draft[depth];
      drafts += verified;
      skipped += depth === 0 ? 1 : 0;
      steps += 1;
    });
  }
  return {
    tokens_per_s: model.scale * tokens / seconds,
    speed: model.speed_scale * tokens / seconds / requests,
    tau: tokens / (steps * requests),
    drafts: drafts / (steps * requests),
    seconds: seconds / steps,
    skipped: skipped / steps,
  };
}
