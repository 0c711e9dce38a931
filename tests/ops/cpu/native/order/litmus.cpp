// The machine itself: programs of a few operations whose outcomes under C++'s memory model are known.

#include <atomic>
#include <cstdio>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "machine.h"

namespace {

using std::memory_order_acquire;
using std::memory_order_relaxed;
using std::memory_order_release;
using std::memory_order_seq_cst;
using Word = std::atomic<int>;

template <class... F>
void in_parallel(F... f) {
    std::thread threads[]{std::thread(f)...};
    for (std::thread& thread : threads) thread.join();
}

template <int Store, int Load>
void store_buffers() {
    Word x{0}, y{0};
    int a = 0, b = 0;
    in_parallel([&] { x.store(1, std::memory_order(Store)), a = y.load(std::memory_order(Load)); },
                [&] { y.store(1, std::memory_order(Store)), b = x.load(std::memory_order(Load)); });
    machine::outcome(10 * a + b);
}

template <int Store, int Load>
void message() {
    Word data{0}, flag{0};
    int seen = 0, found = 0;
    in_parallel([&] { data.store(1, memory_order_relaxed), flag.store(1, std::memory_order(Store)); },
                [&] { seen = flag.load(std::memory_order(Load)), found = data.load(memory_order_relaxed); });
    machine::outcome(10 * seen + found);
}

void coherence() {  // two readers of one location agree on the order of its stores
    Word x{0};
    int a = 0, b = 0, c = 0, d = 0;
    in_parallel([&] { x.store(1, memory_order_relaxed); }, [&] { x.store(2, memory_order_relaxed); },
                [&] { a = x.load(memory_order_relaxed), b = x.load(memory_order_relaxed); },
                [&] { c = x.load(memory_order_relaxed), d = x.load(memory_order_relaxed); });
    machine::demand(!(a == 1 && b == 2 && c == 2 && d == 1), "two orders of one location's stores");
    machine::demand(!(a && !b), "a newer store is forgotten");
    machine::outcome(1000 * a + 100 * b + 10 * c + d);
}

template <int Order>
void four_threads() {  // independent reads of independent writes
    Word x{0}, y{0};
    int a = 0, b = 0, c = 0, d = 0;
    const auto store = std::memory_order(Order == 5 ? 5 : 3), load = std::memory_order(Order == 5 ? 5 : 2);
    in_parallel([&] { x.store(1, store); }, [&] { y.store(1, store); }, [&] { a = x.load(load), b = y.load(load); },
                [&] { c = y.load(load), d = x.load(load); });
    machine::outcome(1000 * a + 100 * b + 10 * c + d);
}

void two_writers() {  // 2+2W: each one's first store may end up last
    Word x{0}, y{0};
    in_parallel([&] { x.store(1, memory_order_relaxed), y.store(2, memory_order_relaxed); },
                [&] { y.store(1, memory_order_relaxed), x.store(2, memory_order_relaxed); });
    machine::outcome(10 * x.load(memory_order_relaxed) + y.load(memory_order_relaxed));
}

template <int Order>
void release_sequence() {  // what a release store published stays published after others' read-modify-writes
    Word flag{0};
    int data = 0, seen = 0;
    in_parallel([&] { data = 1, flag.store(1, std::memory_order(Order)); },
                [&] { flag.fetch_add(2, memory_order_relaxed); },
                [&] {
                    seen = flag.load(memory_order_acquire);
                    if (seen & 1) machine::demand(data == 1, "published data");
                });
    machine::outcome(seen);
}

void counted() {
    Word count{0};
    int first = 0, second = 0;
    in_parallel([&] { first = count.fetch_add(1, memory_order_relaxed); },
                [&] { second = count.fetch_add(1, memory_order_relaxed); });
    machine::demand(first != second && count.load(memory_order_relaxed) == 2, "each number is given once");
    machine::outcome(first);
}

// Programs of random loads, stores and additions on two locations, by two or three threads.
struct Random {
    struct Op {
        int what, location, order;
    };
    std::vector<std::vector<Op>> threads;

    explicit Random(std::mt19937& generator) {
        const auto below = [&](int limit) { return static_cast<int>(generator() % limit); };
        const bool three = below(3) == 0;
        for (int t = 0; t < 2 + three; t++) {
            threads.emplace_back();
            for (int ops = 1 + below(three ? 2 : 3); ops > 0; ops--) {
                const int what = below(3);
                const int loads[]{0, 2, 5}, stores[]{0, 3, 5}, both[]{0, 2, 3, 4, 5};
                threads[t].push_back({what, below(2),
                                      what == 0   ? loads[below(3)]
                                      : what == 1 ? stores[below(3)]
                                                  : both[below(5)]});
            }
        }
    }
    void run() const {
        Word words[2]{{0}, {0}};
        std::vector<int> seen(threads.size(), 1);
        std::vector<std::thread> running;
        for (size_t t = 0; t < threads.size(); t++)
            running.emplace_back([&, t] {
                int number = 10 * static_cast<int>(t);
                for (const Op& op : threads[t]) {
                    const auto order = std::memory_order(op.order);
                    Word& word = words[op.location];
                    number++;
                    if (op.what == 0) seen[t] = 31 * seen[t] + word.load(order);
                    if (op.what == 1) word.store(number, order);
                    if (op.what == 2) seen[t] = 31 * seen[t] + word.fetch_add(100 * number, order);
                }
            });
        for (std::thread& thread : running) thread.join();
        int all = words[0].load(memory_order_relaxed) + 7 * words[1].load(memory_order_relaxed);
        for (int one : seen) all = 1009 * all + one;
        machine::outcome(all & 0x7fffffff);
    }
};
const Random* program;

int compare(int count) {
    std::mt19937 generator(3);
    for (int i = 0; i < count; i++) {
        const Random random(generator);
        program = &random;
        if (machine::reduction_is_right({"random", [] { program->run(); }})) continue;
        std::printf("program %d: the reduction loses executions\n", i);
        return 1;
    }
    std::printf("%d programs\n", count);
    return 0;
}

}  // namespace

int main(int count, char** arguments) {
    if (count == 3 && std::string(arguments[1]) == "--random") return compare(std::atoi(arguments[2]));
    return machine::explore(count, arguments,
                            {{"store buffers, relaxed", store_buffers<0, 0>},
                             {"store buffers, release and acquire", store_buffers<3, 2>},
                             {"store buffers, seq_cst", store_buffers<5, 5>},
                             {"message, relaxed", message<0, 0>},
                             {"message, release alone", message<3, 0>},
                             {"message, release and acquire", message<3, 2>},
                             {"coherence", coherence},
                             {"four threads, release and acquire", four_threads<2>},
                             {"four threads, seq_cst", four_threads<5>},
                             {"two writers", two_writers},
                             {"release sequence", release_sequence<3>},
                             {"counted", counted}});
}
