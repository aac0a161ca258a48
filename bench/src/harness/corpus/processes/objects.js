let state = 3;
const next = (below) => (state = (Math.imul(state, 1103515245) + 12345) >>> 0, (state >>> 8) % below);
const word = () => Array.from({length: 2 + next(8)}, () => 'etaoinshrdlu'[next(12)]).join('');
const words = Array.from({length: 5000}, word);
const pick = () => words[next(words.length)];
const record = (id) => ({id, name: `${pick()} ${pick()}`, tags: [pick(), pick(), pick()], score: next(1e6) / 7,
    position: {x: next(1e5) / 9, y: next(1e5) / 11}, active: next(2) === 1});
const text = JSON.stringify(Array.from({length: 40000}, (_, id) => record(id)));
const parsed = JSON.parse(text);
const byName = new Map(parsed.map((item) => [item.name + item.id, item]));
const sessions = new Set(parsed.map((item) => item.id.toString(36) + pick()));
const listeners = parsed.slice(0, 20000).map((item) => () => item.score + item.position.x);
const floats = Float64Array.from({length: 500000}, () => next(1e9) / 1e5);
console.log('ready');
setInterval(() => [byName, sessions, listeners, floats, text], 1000000);
