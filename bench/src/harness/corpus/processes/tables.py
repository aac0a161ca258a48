import random, sqlite3, time
rng = random.Random(2)
words = [''.join(rng.choices('etaoinshrdlu', k=rng.randrange(2, 10))) for _ in range(5000)]
db = sqlite3.connect(':memory:')
db.executescript('''
    create table customers (id integer primary key, name text, mail text, since text);
    create table orders (id integer primary key, customer integer, item text, note text, price real, at integer);
    create index orders_of on orders (customer, at);
    create index items on orders (item);
''')
def text(count):
    return ' '.join(rng.choices(words, k=count))
db.executemany('insert into customers values (?, ?, ?, ?)',
    ((i, text(2), rng.choice(words) + '@example.com', f'20{rng.randrange(10, 26)}-{rng.randrange(1, 13):02}-07')
     for i in range(40000)))
db.executemany('insert into orders values (?, ?, ?, ?, ?, ?)',
    ((i, rng.randrange(40000), text(2), text(rng.randrange(12)), round(rng.random() * 500, 2),
      1700000000 + rng.randrange(86400 * 365)) for i in range(160000)))
db.execute('delete from orders where id % 9 = 4')
db.commit()
print('ready', flush=True)
time.sleep(3600)
