#include <algorithm>
#include <functional>
#include <future>
#include <iostream>
#include <map>
#include <memory>
#include <random>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <tuple>
#include <unordered_map>
#include <variant>
#include <vector>

template <int N> struct Table {
    std::map<int, std::vector<std::string>> rows;
    std::unordered_map<std::string, std::tuple<int, double, std::shared_ptr<Table<N - 1>>>> index;
    std::variant<int, std::string, std::vector<double>> value;
    std::regex pattern{"([a-z]+)-([0-9]+)"};

    double add(const std::string &line) {
        std::smatch match;
        std::vector<std::pair<std::string, int>> parts;
        if (std::regex_search(line, match, pattern)) {
            for (const auto &part : match) parts.emplace_back(part.str(), N);
        }
        std::sort(parts.begin(), parts.end(), [](auto &a, auto &b) { return a.second + N < b.second; });
        for (auto &[name, number] : parts) {
            rows[number].push_back(name);
            auto next = std::make_shared<Table<N - 1>>();
            index[name] = {number, next->add(name), next};
        }
        std::function<double(int)> walk = [this, &walk](int at) { return at <= N ? 0.5 : walk(at - 1) + rows.size(); };
        auto later = std::async([&] { return walk(N + 7); });
        std::ostringstream out;
        std::visit([&](auto &held) { out << sizeof(held); }, value);
        return later.get() + out.str().size();
    }
};
template <> struct Table<0> {
    double add(const std::string &) { return 1; }
};

int main() {
    std::cout << Table<150>().add("words-12") << std::endl;
}
