#include <algorithm>
#include <functional>
#include <map>
#include <regex>
#include <string>
#include <vector>

struct SNTH { std::string a; long b; std::vector<int> c; bool operator<(const SNTH &o) const { return b < o.b; } };
long fNTH(std::map<SNTH, std::vector<SNTH>> &m, std::vector<std::function<long(const SNTH &)>> &g) {
  long t = 0;
  std::vector<SNTH> v;
  for (auto &[k, w] : m) { for (auto &h : g) t += h(k); v.insert(v.end(), w.begin(), w.end()); }
  std::sort(v.begin(), v.end(), [](const SNTH &x, const SNTH &y) { return x.a < y.a; });
  for (auto &x : v) m[x].push_back(x);
  return t;
}
