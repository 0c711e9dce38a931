#include "runtime/topology.h"

#include <sched.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <optional>
#include <set>

namespace umbra {
namespace {

// Reads a file like "0-3,8,10-11" with increasing numbers below kMostCpus. Empty for a missing, overlong or malformed
// file.
std::optional<std::vector<int>> read_list(const std::string& path) {
    char text[8192];
    std::ifstream file(path);
    if (!file) return {};
    file.read(text, sizeof text - 1);
    if (!file.eof()) return {};
    text[file.gcount()] = 0;
    std::vector<int> list;
    for (char* at = text; *at && *at != '\n';) {
        char* end;
        const long first = std::strtol(at, &end, 10);
        long last = first;
        if (end == at) return {};
        if (*end == '-') {
            at = end + 1;
            last = std::strtol(at, &end, 10);
            if (end == at) return {};
        }
        if (first <= (list.empty() ? -1 : list.back()) || last < first || last >= kMostCpus) return {};
        for (long i = first; i <= last; i++) list.push_back(static_cast<int>(i));
        if (*end == ',')
            end++;
        else if (*end && *end != '\n')
            return {};
        at = end;
    }
    return list;
}

std::vector<std::vector<int>> cores_of(const std::string& root, const std::vector<int>& cpus) {
    std::vector<std::vector<int>> cores;
    std::set<int> left(cpus.begin(), cpus.end());
    while (!left.empty()) {
        const int cpu = *left.begin();
        left.erase(left.begin());
        cores.push_back({cpu});
        const auto siblings = read_list(root + "/cpu/cpu" + std::to_string(cpu) + "/topology/thread_siblings_list");
        if (!siblings) continue;
        for (const int sibling : *siblings)
            if (left.erase(sibling)) cores.back().push_back(sibling);
    }
    return cores;
}

int count_cores(const std::vector<Node>& nodes) {
    size_t cores = 0;
    for (const Node& node : nodes) cores += node.cores.size();
    return static_cast<int>(cores);
}

std::vector<int> cpus_of(const Node& node) {
    std::vector<int> cpus;
    for (const auto& core : node.cores) cpus.insert(cpus.end(), core.begin(), core.end());
    return cpus;
}

std::vector<Team> plan_pinned(const std::vector<Node>& nodes, int threads) {
    std::vector<Team> teams = plan(nodes, threads);
    if (nodes.size() == 1) teams[0].cpus = cpus_of(nodes[0]);
    return teams;
}

}  // namespace

std::vector<int> allowed_cpus() {
    cpu_set_t set;
    CPU_ZERO(&set);
    std::vector<int> cpus;
    if (sched_getaffinity(0, sizeof set, &set) == 0)
        for (int i = 0; i < kMostCpus; i++)
            if (CPU_ISSET(i, &set)) cpus.push_back(i);
    if (cpus.empty()) cpus.push_back(0);  // fails only if there are more CPUs than the set holds
    return cpus;
}

std::vector<Node> read_nodes(const std::string& root, const std::vector<int>& allowed) {
    const auto one = [&] { return std::vector<Node>{{-1, cores_of(root, allowed)}}; };
    const auto online = read_list(root + "/node/online");
    if (!online || online->size() < 2) return one();
    std::set<int> left(allowed.begin(), allowed.end());
    std::vector<Node> nodes;
    for (const int id : *online) {
        const auto cpus = read_list(root + "/node/node" + std::to_string(id) + "/cpulist");
        if (!cpus) return one();
        std::vector<int> mine;
        for (const int cpu : *cpus) {
            if (!std::count(allowed.begin(), allowed.end(), cpu)) continue;
            if (!left.erase(cpu)) return one();  // listed on two nodes
            mine.push_back(cpu);
        }
        if (!mine.empty()) nodes.push_back({id, cores_of(root, mine)});
    }
    return left.empty() ? nodes : one();
}

std::vector<Node> share(const std::vector<Node>& nodes, int rank, int ranks) {
    const size_t cores = count_cores(nodes);
    const size_t begin = rank * cores / ranks, end = std::max((rank + 1) * cores / ranks, begin + 1);
    std::vector<Node> mine;
    size_t at = 0;
    for (const Node& node : nodes)
        for (const auto& core : node.cores) {
            if (at >= begin && at < end) {
                if (mine.empty() || mine.back().memory != node.memory) mine.push_back({node.memory, {}});
                mine.back().cores.push_back(core);
            }
            at++;
        }
    return mine;
}

std::vector<Team> plan(const std::vector<Node>& nodes, int threads) {
    std::vector<Team> teams(nodes.size());
    for (size_t n = 0; n < nodes.size(); n++) {
        teams[n].memory = nodes[n].memory;
        teams[n].threads = 0;
        if (nodes[n].memory < 0) continue;
        teams[n].cpus = cpus_of(nodes[n]);
    }
    // Each thread goes to the node that then has most cores per thread; nodes without a thread come first.
    const auto gain = [&](size_t n) {
        const int given = teams[n].threads;
        return (given ? 0.0 : kMostCpus) + static_cast<double>(nodes[n].cores.size()) / (given + 1);
    };
    for (int t = 0; t < threads; t++) {
        size_t best = 0;
        for (size_t n = 1; n < nodes.size(); n++)
            if (gain(n) > gain(best)) best = n;
        teams[best].threads++;
    }
    teams.erase(std::remove_if(teams.begin(), teams.end(), [](const Team& team) { return team.threads == 0; }),
                teams.end());
    return teams;
}

std::pair<std::vector<Team>, std::vector<Team>> divide(const std::vector<Node>& nodes, int device, int shadow) {
    const int cores = count_cores(nodes);
    if (shadow == 0 || cores <= 2 || device + shadow > cores) return {plan(nodes, device), plan(nodes, shadow)};
    std::vector<Node> left, taken;
    const std::vector<Team> teams = plan(nodes, shadow);
    for (const Node& node : nodes) {
        const auto has = [&](const Team& team) { return team.memory == node.memory; };
        const auto team = std::find_if(teams.begin(), teams.end(), has);
        const auto middle = node.cores.end() - (team == teams.end() ? 0 : team->threads);
        if (middle != node.cores.begin()) left.push_back({node.memory, {node.cores.begin(), middle}});
        if (middle != node.cores.end()) taken.push_back({node.memory, {middle, node.cores.end()}});
    }
    return {plan_pinned(left, device), plan_pinned(taken, shadow)};
}

}  // namespace umbra
