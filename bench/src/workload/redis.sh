# redis.sh SOCKET KEYS COMMAND...: a server, started by the command, is given so many values of 1 KiB, asked for random ones by
# redis-benchmark, and checked.
socket=$1 keys=$2
shift 2
"$@" redis-server --port 0 --unixsocket "$socket" --save '' --appendonly no --maxmemory 0 >/dev/null &
server=$!
end() {
    redis-cli -s "$socket" shutdown nosave >/dev/null 2>&1 || kill "$server" 2>/dev/null
    wait "$server"
}
trap end EXIT
tries=0
until redis-cli -s "$socket" ping >/dev/null 2>&1; do
    tries=$((tries + 1))
    [ "$tries" -lt 1000 ] && kill -0 "$server" 2>/dev/null || exit 1
    sleep 0.01
done
value='local function value(i)
  local text = {}
  for nth = 1, 8 do
    text[nth] = string.format("{\"at\": %d, \"who\": \"user-%d\", \"what\": \"%s\", \"state\": \"waiting for the next page\", \"size\": %d}",
      i * nth % 86400, i * 48271 % 65537, string.format("%x", i * 2654435761 % 4294967291 * nth), i * nth % 100003)
  end
  return string.format("{\"id\": %d, \"history\": [%s]}", i, table.concat(text, ", "))
end
'
from=0
while [ "$from" -lt "$keys" ]; do
    to=$((from + 10000))
    [ "$to" -le "$keys" ] || to=$keys
    redis-cli -s "$socket" eval "$value for i = ARGV[1], ARGV[2] - 1 do
      redis.call('SET', string.format('key:%012d', i), value(i)) end" 0 "$from" "$to" >/dev/null
    from=$to
done
redis-benchmark -s "$socket" -q -n $((2 * keys)) -r "$keys" -P 16 -c 8 GET key:__rand_int__ >/dev/null
wrong=0
from=0
while [ "$from" -lt "$keys" ]; do
    to=$((from + 10000))
    [ "$to" -le "$keys" ] || to=$keys
    wrong=$((wrong + $(redis-cli -s "$socket" eval "$value local wrong = 0 for i = ARGV[1], ARGV[2] - 1 do
      if redis.call('GET', string.format('key:%012d', i)) ~= value(i) then wrong = wrong + 1 end end return wrong" 0 "$from" "$to")))
    from=$to
done
echo "$(redis-cli -s "$socket" dbsize) keys, $wrong wrong"
