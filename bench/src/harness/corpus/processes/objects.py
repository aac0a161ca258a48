import ast, os, random, re, resource, sys, sysconfig, time
rng = random.Random(1)
folder = sysconfig.get_paths()['stdlib']
names = sorted(name for name in os.listdir(folder) if name.endswith('.py'))
def build(names, first):
    trees, lines, words = {}, {}, {}
    for name in names:
        with open(os.path.join(folder, name), encoding='utf-8') as file:
            text = file.read()
        trees[name] = ast.parse(text)
        lines[name] = text.splitlines()
        for word in re.findall(r'\w+', text):
            words[word] = words.get(word, 0) + 1
    known = sorted(words)
    records = [{'id': first + i, 'name': ' '.join(rng.choices(known, k=3)), 'score': rng.random(),
                'tags': rng.choices(known, k=4), 'seen': {rng.randrange(1 << 20) for _ in range(5)}}
               for i in range(20000)]
    return trees, lines, words, known, records
kept = [build(names[:60], 0)]
while resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10 < int(sys.argv[1]):
    kept.append(build(rng.sample(names, 60), 20000 * len(kept)))
print('ready', flush=True)
time.sleep(3600)
