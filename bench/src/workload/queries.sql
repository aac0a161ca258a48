-- A table and its indexes in memory: built, looked up in no order, changed, and summed up.
-- ROWS is replaced by their number.
PRAGMA temp_store = MEMORY;
CREATE TABLE items (id INTEGER PRIMARY KEY, name TEXT, kind INTEGER, body TEXT);
WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < ROWS)
INSERT INTO items SELECT i, printf('item-%09d', (i * 2654435761) % 2000000007), i % 1000,
  printf('{"id": %d, "owner": "user-%d", "state": "%s", "tags": ["cold", "page-%d"], "note": "%s"}', i,
    (i * 48271) % 65537, CASE i % 3 WHEN 0 THEN 'open' WHEN 1 THEN 'closed' ELSE 'waiting' END, i % 4096, hex(i * 40503))
FROM n;
CREATE INDEX by_name ON items (name);
CREATE INDEX by_kind ON items (kind, id);
WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < ROWS)
SELECT count(*), sum(length(body)) FROM n JOIN items ON items.id = (i * 7919) % ROWS + 1;
UPDATE items SET body = body || ' changed' WHERE kind < 50;
SELECT kind % 10, count(*), sum(length(body)) FROM items WHERE kind < 200 GROUP BY 1 ORDER BY 1;
SELECT sum(id) FROM items WHERE name > 'item-1' AND name < 'item-11';
