// Objects that point to each other: built, looked up, a tenth replaced, and all read again. The argument is their number.
"use strict";
const count = Number(process.argv[2]);
let seed = 1;
const random = (n) => {
  seed = (seed * 48271) % 2147483647;
  return seed % n;
};
const items = [];
for (let i = 0; i < count; i++) {
  const name = `item-${(i * 2654435761) % 2000000007}`;
  items.push({ id: i, name, tags: [i % 7, i % 11, i % 13], next: null });
}
for (let i = 0; i < count; i++) items[i].next = items[(i * 48271) % count];
let sum = 0;
for (let i = 0; i < count; i++) {
  const item = items[random(random(10) < 9 ? Math.ceil(count / 10) : count)];
  sum = (sum + item.next.id + item.tags[i % 3]) % 1000000007;
  if (i % 10 === 0) {
    const at = random(count);
    items[at] = { ...items[at], name: `changed-${i}` };
  }
}
let check = 0;
for (const item of items) check = (check * 31 + item.id + item.name.length) % 1000000007;
console.log(sum, check);
