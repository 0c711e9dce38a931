#include "machine.h"

#include <bits/atomic_futex.h>
#include <cxxabi.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/single_threaded.h>
#include <ucontext.h>
#include <csetjmp>
#include <csignal>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <new>
#include <set>
#include <string>
#include <vector>

#include <chrono>
#include <condition_variable>

namespace machine {
namespace {

constexpr int kThreads = 6, kLocations = 128, kMostOps = 3000;
constexpr size_t kHeap = 1 << 18, kStack = 1 << 16, kRegion = kHeap + kThreads * kStack;
constexpr uint32_t kGap = 1 << 12;  // between the places of neighbouring stores

enum Order { kRelaxed = 0, kConsume = 1, kAcquire = 2, kRelease = 3, kAcqRel = 4, kSeqCst = 5 };  // as GCC numbers them
bool acquires(int order) { return order == kAcquire || order == kAcqRel || order == kSeqCst || order == kConsume; }
bool releases(int order) { return order == kRelease || order == kAcqRel || order == kSeqCst; }

enum Kind {
    kBegin,
    kLoad,
    kStore,
    kRmw,
    kLock,
    kCondWait,
    kNotify,
    kFutexWait,
    kFutexWake,
    kResume,
    kTimeout,
    kJoin,
    kSettle
};
const char* const kNames[] = {"begin", "load", "store",  "rmw",     "lock", "wait",  "notify",
                              "sleep", "wake", "resume", "timeout", "join", "settle"};

const char* const kOrders[] = {"relaxed", "consume", "acquire", "release", "acq_rel", "seq_cst"};

struct Op {
    Kind kind = kBegin;
    const void* on = nullptr;  // the location, mutex, condition or thread
    int order = kRelaxed;
    const void* site = nullptr;  // where it stands in the program
    bool sc() const { return order == kSeqCst && kind <= kRmw; }
    bool writes() const { return kind == kStore || kind == kRmw; }
    bool reads_only() const { return kind == kLoad || kind == kFutexWait; }
};

struct
    Knowledge {  // what a thread knows: the steps of others that happened before, and the newest store of each location
    uint16_t clock[kThreads] = {};
    uint32_t view[kLocations] = {};
    void join(const Knowledge& other) {
        for (int i = 0; i < kThreads; i++) clock[i] = std::max(clock[i], other.clock[i]);
        for (int i = 0; i < kLocations; i++) view[i] = std::max(view[i], other.view[i]);
    }
};

struct Store {
    uint64_t value;
    uint32_t place;      // in the modification order
    int id;              // in the order of execution
    int step;            // of the execution that wrote it, -1: before
    bool taken = false;  // a read-modify-write follows it directly
    bool carries = false;
    Knowledge carried;
};

struct Location {
    std::vector<Store> stores;  // in modification order
    uint32_t newest_sc = 0;     // place of the newest store that a sequentially consistent operation wrote or read
    uint32_t woken = 0;         // place of the newest store known to a wake-up
    int written = 0;            // stores so far
};

struct Mutex {
    int owner = -1;
    Knowledge carried;
    int step = -1;  // that unlocked it last
};

struct Thread {
    int number = 0;
    enum { kFree, kReady, kAsleep, kEnded } state = kFree;
    Op next;
    const void* waits_on = nullptr;  // asleep
    bool timed = false, timed_out = false;
    int64_t now = 0, deadline = 0;  // nanoseconds
    Knowledge knows;
    int last_step = -1;
    void* (*start)(void*) = nullptr;
    void* argument = nullptr;
    bool detached = false;
    ucontext_t begin;
    jmp_buf at;
    bool begun = false;
    char exceptions[16] = {};
};

struct Sleep {
    bool asleep = false;
    int tried = 0;  // stores of its location when it was tried
};

struct Node {  // of the search: which thread goes on, or one of several ways
    bool schedule;
    int chosen, ways = 0;
    unsigned enabled = 0, wanted = 0, done = 0;
    Sleep sleep[kThreads];
    int tried[kThreads] = {};

    Node(bool schedule, int chosen, int ways = 0) : schedule(schedule), chosen(chosen), ways(ways) {}
};

struct Cell {  // of plain memory: a byte's last write and reads
    uint16_t written = 0, read[kThreads] = {};
    uint8_t writer = 0, freed = 0;
};

struct Event {
    int thread;
    Op op;
    int node;
    uint64_t value;
    std::vector<uint64_t> after;  // bits: the steps that it depends on
};

struct Mutation {
    const void* site = nullptr;
    int order = -1;  // instead of the program's
    bool leave_out = false;
} mutation;

struct Site {
    Kind kind;
    int order;
};
std::map<const void*, Site> sites;

// The search.
std::vector<Node> path;
size_t depth = 0;
bool naive = false;
long executions = 0, cut = 0;
std::map<int, long> outcomes;
int ended_so = -1;

// The execution.
char* region = nullptr;
Cell* cells = nullptr;
size_t heap_used = 0;
std::vector<std::pair<size_t, size_t>> dirty;
Thread threads[kThreads];
int thread_count = 0, current = -1;
bool active = false, failed = false;
int timeouts_left = 0;
std::string why;
std::map<const void*, int> number_of;
std::vector<Location> locations;
std::map<const void*, Mutex> mutexes;
std::vector<Event> events;
std::map<const void*, size_t> sizes;  // of heap blocks
Sleep sleeping[kThreads];
Sleep already;  // what the operation that is executed was tried with
sigjmp_buf scheduler;
int inside = 0;  // the machine's own code runs

struct Inside {
    Inside() { inside++; }
    ~Inside() { inside--; }
};

Thread& self() { return threads[current]; }

void swap_exceptions(Thread& thread, bool in) {
    char* at = reinterpret_cast<char*>(abi::__cxa_get_globals());
    if (in)
        memcpy(at, thread.exceptions, sizeof thread.exceptions);
    else
        memcpy(thread.exceptions, at, sizeof thread.exceptions);
}

void to_scheduler() {
    Thread& thread = self();
    swap_exceptions(thread, false);
    if (_setjmp(thread.at) == 0) siglongjmp(scheduler, 1);
}

[[noreturn]] void fail(const char* text, ...) {
    inside++;
    if (!failed) {
        char line[400];
        va_list list;
        va_start(list, text);
        vsnprintf(line, sizeof line, text, list);
        va_end(list);
        why = line;
    }
    failed = true;
    siglongjmp(scheduler, 2);
}

// ---- the search ----

int way(int ways) {  // one of several ways to go on; all are tried
    if (ways == 1) return 0;
    if (depth == path.size()) path.emplace_back(false, 0, ways);
    return path[depth++].chosen;
}

int location_of(const void* at, uint64_t now) {
    const auto found = number_of.find(at);
    if (found != number_of.end()) return found->second;
    const int number = static_cast<int>(locations.size());
    if (number == kLocations) fail("too many atomic locations");
    number_of[at] = number;
    locations.emplace_back();
    Store first{};
    first.value = now, first.place = kGap, first.step = -1;
    locations.back().stores.push_back(first);
    locations.back().written = 1;
    return number;
}

// Whether two operations of different threads, f before e, are to be tried in the other order as well.
bool reversible(const Op& f, const Op& e) {
    if (f.on != e.on || !f.on) return false;
    const auto either = [&](Kind a, Kind b) { return (f.kind == a && e.kind == b) || (f.kind == b && e.kind == a); };
    if (f.kind == kLock && e.kind == kLock) return true;
    if (either(kCondWait, kNotify) || either(kTimeout, kNotify)) return true;
    if (either(kFutexWait, kFutexWake) || either(kTimeout, kFutexWake)) return true;
    const bool both_sc = f.sc() && e.sc();
    if (f.writes() && e.writes()) return true;
    if (f.reads_only() && e.writes()) return true;
    if (f.writes() && e.reads_only()) return both_sc;  // else the load may read what was there before
    return f.kind == kLoad && e.kind == kLoad && both_sc;
}

// What executing e does to an operation that was tried and waits: 0 nothing, 1 it may read e's store, 2 it is new.
int wakes(const Op& e, const Op& waiting) {
    if (waiting.on != e.on || !e.on) return 0;
    if (waiting.reads_only() && e.writes()) return waiting.sc() && e.sc() ? 2 : 1;
    if (waiting.writes() && e.kind == kLoad) return waiting.sc() && e.sc() ? 2 : 0;
    if (waiting.writes() && e.kind == kFutexWait) return 0;
    return reversible(e, waiting) || reversible(waiting, e) ? 2 : 0;
}

bool enabled(const Thread& thread) {
    if (thread.state == Thread::kAsleep) return thread.timed && timeouts_left > 0;
    if (thread.state != Thread::kReady) return false;
    if (thread.next.kind == kLock) {
        const auto found = mutexes.find(thread.next.on);
        return found == mutexes.end() || found->second.owner < 0;
    }
    if (thread.next.kind == kSettle) {
        for (int t = 0; t < thread_count; t++)
            if (t != thread.number && threads[t].state == Thread::kReady) return false;
        return true;
    }
    if (thread.next.kind == kJoin) return static_cast<const Thread*>(thread.next.on)->state == Thread::kEnded;
    return true;
}

Op next_of(const Thread& thread) {
    if (thread.state != Thread::kAsleep) return thread.next;
    return {kTimeout, thread.waits_on};
}

int stores_of(const Op& op) {
    const auto found = number_of.find(op.on);
    return found == number_of.end() ? 0 : locations[found->second].written;
}

// Whether a thread that was tried may now read something new.
bool has_news(int thread) {
    const Op op = next_of(threads[thread]);
    return op.reads_only() && stores_of(op) > sleeping[thread].tried;
}

int pick(bool& blocked) {
    unsigned can = 0;
    for (int t = 0; t < thread_count; t++)
        if (enabled(threads[t])) can |= 1u << t;
    blocked = !can;
    if (!can) return -1;
    if (depth == path.size()) {
        int first = -1;
        const auto fits = [&](int t) { return can >> t & 1 && (!sleeping[t].asleep || has_news(t)); };
        if (current >= 0 && fits(current) && threads[current].state == Thread::kReady) first = current;
        for (int t = 0; t < thread_count && first < 0; t++)
            if (fits(t) && threads[t].state == Thread::kReady) first = t;
        for (int t = 0; t < thread_count && first < 0; t++)
            if (fits(t)) first = t;
        if (first < 0) return -1;
        Node node(true, first);
        node.enabled = can;
        node.wanted = naive ? can : 1u << first;
        // Whether a wait ends early depends on nothing that would ask for it later.
        for (int t = 0; t < thread_count; t++)
            if (can >> t & 1 && threads[t].state == Thread::kAsleep) node.wanted |= 1u << t;
        for (int t = 0; t < kThreads; t++) node.sleep[t] = sleeping[t];
        path.push_back(node);
    }
    Node& node = path[depth];
    for (int t = 0; t < thread_count; t++) node.tried[t] = stores_of(next_of(threads[t]));
    return path[depth].chosen;
}

void put_to_sleep(const Node& node, const Op& executed, int thread) {
    for (int t = 0; t < kThreads; t++) {
        Sleep s = node.sleep[t];
        if (node.done >> t & 1) s = {true, node.tried[t]};
        if (t == thread || (s.asleep && wakes(executed, next_of(threads[t])) == 2)) s = {};
        sleeping[t] = naive ? Sleep{} : s;
    }
}

bool depends(const Event& event, int on) {
    return static_cast<size_t>(on) / 64 < event.after.size() && event.after[on / 64] >> on % 64 & 1;
}

void merge(std::vector<uint64_t>& to, const std::vector<uint64_t>& from) {
    if (to.size() < from.size()) to.resize(from.size());
    for (size_t i = 0; i < from.size(); i++) to[i] |= from[i];
}

void add_bit(std::vector<uint64_t>& to, int bit) {
    if (to.size() <= static_cast<size_t>(bit) / 64) to.resize(bit / 64 + 1);
    to[bit / 64] |= uint64_t{1} << bit % 64;
}

// Records that `thread` executes `op`, and asks for the other order where that makes a difference.
Event& record(int thread, const Op& op, int node) {
    const int number = static_cast<int>(events.size());
    if (number == kMostOps) fail("it does not end: %d operations", kMostOps);
    Event event{thread, op, node, 0, {}};
    const int last = threads[thread].last_step;
    if (last >= 0) {
        merge(event.after, events[last].after);
        add_bit(event.after, last);
    }
    for (int f = number - 1; f >= 0; f--) {
        if (events[f].thread == thread || !reversible(events[f].op, op) || depends(event, f)) continue;
        Node& back = path[events[f].node];
        back.wanted |= back.enabled >> thread & 1 ? 1u << thread : back.enabled;
        break;
    }
    for (int f = number - 1; f >= 0; f--)
        if (events[f].thread != thread && reversible(events[f].op, op)) {
            merge(event.after, events[f].after);
            add_bit(event.after, f);
        }
    events.push_back(event);
    threads[thread].last_step = number;
    return events.back();
}

void follow(int step) {  // the current event depends on an earlier one
    if (step < 0 || step == static_cast<int>(events.size()) - 1) return;
    merge(events.back().after, events[step].after);
    add_bit(events.back().after, step);
}

// Goes on to the next path; false after the last.
bool advance() {
    while (!path.empty()) {
        Node& node = path.back();
        if (!node.schedule) {
            if (++node.chosen < node.ways) return true;
        } else {
            node.done |= 1u << node.chosen;
            const unsigned left = node.wanted & ~node.done & node.enabled;
            for (int t = 0; t < kThreads; t++)
                if (left >> t & 1 && (naive || !node.sleep[t].asleep || node.tried[t] > node.sleep[t].tried)) {
                    node.chosen = t;
                    return true;
                }
        }
        path.pop_back();
    }
    return false;
}

// ---- plain memory ----

void mark(size_t from, size_t to) {
    if (!dirty.empty() && dirty.back().first <= from && from <= dirty.back().second) {
        dirty.back().second = std::max(dirty.back().second, to);
        return;
    }
    dirty.push_back({from, to});
}

void touch(const void* memory, size_t bytes, bool write, const char* what) {
    const char* at = static_cast<const char*>(memory);
    if (at < region || at >= region + kRegion) return;
    const size_t first = at - region;
    mark(first, first + bytes);
    Thread& thread = self();
    const uint16_t now = thread.knows.clock[current];
    for (size_t i = first; i < first + bytes; i++) {
        Cell& cell = cells[i];
        if (cell.freed) fail("%s of memory that was freed, by thread %d", what, current);
        if (cell.written > thread.knows.clock[cell.writer] && cell.writer != current)
            fail("race: %s by thread %d after a write by thread %d", what, current, cell.writer);
        if (write) {
            for (int t = 0; t < thread_count; t++)
                if (t != current && cell.read[t] > thread.knows.clock[t])
                    fail("race: %s by thread %d after an access by thread %d", what, current, t);
            cell.written = now, cell.writer = static_cast<uint8_t>(current);
        } else {
            cell.read[current] = now;
        }
    }
}

// ---- the threads' side ----

// Waits until the scheduler lets this operation happen.
void announce(const Op& op) {
    Inside in;
    self().next = op;
    sites.emplace(op.site, Site{op.kind, op.order});
    to_scheduler();
}

Op mutated(Op op) {
    if (mutation.site && op.site == mutation.site && mutation.order >= 0) op.order = mutation.order;
    return op;
}

bool left_out(const void* site) { return mutation.leave_out && site == mutation.site; }

uint64_t load_from(Location& location, int number, const Op& op, uint32_t least, Store*& from) {
    Thread& thread = self();
    least = std::max(least, thread.knows.view[number]);
    if (op.sc()) least = std::max(least, location.newest_sc);
    const bool partly = already.asleep && !naive;
    std::vector<int> options;
    for (int i = static_cast<int>(location.stores.size()) - 1; i >= 0; i--) {
        const Store& store = location.stores[i];
        if (store.place < least) break;
        if (op.kind == kRmw && store.taken) continue;
        if (partly && op.reads_only() && store.id < already.tried) continue;
        options.push_back(i);
    }
    if (options.empty()) {  // what is new is too old for this thread
        cut++;
        failed = false;
        siglongjmp(scheduler, 3);
    }
    from = &location.stores[options[way(static_cast<int>(options.size()))]];
    follow(from->step);
    thread.knows.view[number] = std::max(thread.knows.view[number], from->place);
    if (acquires(op.order) && from->carries) thread.knows.join(from->carried);
    if (op.sc()) location.newest_sc = std::max(location.newest_sc, from->place);
    return from->value;
}

void store_after(Location& location, int number, const Op& op, size_t index, uint64_t value, const Store* read) {
    Thread& thread = self();
    const uint32_t before = location.stores[index].place;
    const uint32_t place =
        index + 1 < location.stores.size() ? before + (location.stores[index + 1].place - before) / 2 : before + kGap;
    if (place == before) fail("no room between stores");
    Store store{};
    store.value = value, store.place = place, store.id = location.written++;
    store.step = static_cast<int>(events.size()) - 1;
    thread.knows.view[number] = place;
    if (read && read->carries) store.carries = true, store.carried = read->carried;
    if (releases(op.order)) {
        store.carries = true;
        store.carried.join(thread.knows);
    }
    if (op.sc()) location.newest_sc = std::max(location.newest_sc, place);
    location.stores.insert(location.stores.begin() + index + 1, store);
}

uint64_t mask(int bytes) { return bytes == 8 ? ~uint64_t{0} : (uint64_t{1} << 8 * bytes) - 1; }

uint64_t content(const volatile void* at, int bytes) {
    uint64_t value = 0;
    memcpy(&value, const_cast<const void*>(at), bytes);
    return value;
}

struct Access {  // an atomic one, when the scheduler has let it happen
    Op op;
    Location* location;
    int number;

    Access(Kind kind, const volatile void* at, int bytes, int order, const void* site)
        : op(mutated({kind, const_cast<const void*>(at), order, site})) {
        announce(op);
        inside++;
        number = location_of(op.on, content(at, bytes));
        location = &locations[number];
        touch(op.on, bytes, false, "an atomic access");
    }
    ~Access() { inside--; }
};

bool modelled() { return active && !inside && current >= 0; }

template <class T>
T load(const volatile T* at, int order, const void* site) {
    if (!modelled()) return *at;
    Access access(kLoad, at, sizeof(T), order, site);
    Store* from;
    const uint64_t value = load_from(*access.location, access.number, access.op, 0, from);
    events.back().value = value;
    return static_cast<T>(value);
}

template <class T>
void store(volatile T* at, T value, int order, const void* site) {
    if (!modelled()) {
        *at = value;
        return;
    }
    Access access(kStore, at, sizeof(T), order, site);
    Location& location = *access.location;
    uint32_t least = self().knows.view[access.number];
    if (access.op.sc()) least = std::max(least, location.newest_sc);
    std::vector<int> options;
    for (int i = static_cast<int>(location.stores.size()) - 1; i >= 0; i--) {
        if (location.stores[i].place < least) break;
        if (!location.stores[i].taken) options.push_back(i);
    }
    const uint64_t bits = static_cast<uint64_t>(value) & mask(sizeof(T));
    events.back().value = bits;
    store_after(location, access.number, access.op, options[way(static_cast<int>(options.size()))], bits, nullptr);
    *at = static_cast<T>(location.stores.back().value);
}

template <class T, class F>
T change(volatile T* at, int order, const void* site, F&& changed) {
    if (!modelled()) {
        const T old = *at;
        *at = changed(old);
        return old;
    }
    Access access(kRmw, at, sizeof(T), order, site);
    Location& location = *access.location;
    Store* from;
    const uint64_t old = load_from(location, access.number, access.op, 0, from);
    from->taken = true;
    const Store read = *from;
    const uint64_t value = static_cast<uint64_t>(changed(static_cast<T>(old))) & mask(sizeof(T));
    events.back().value = value;
    store_after(location, access.number, access.op, from - location.stores.data(), value, &read);
    *at = static_cast<T>(location.stores.back().value);
    return static_cast<T>(old);
}

void lock(const void* mutex, const void* site) {
    if (!modelled() || left_out(site)) {
        sites.emplace(site, Site{kLock, 0});
        return;
    }
    announce({kLock, mutex, 0, site});
    Inside in;
    Mutex& m = mutexes[mutex];
    m.owner = current;
    follow(m.step);
    self().knows.join(m.carried);
}

void unlock(const void* mutex) {
    if (!modelled()) return;
    Inside in;
    Mutex& m = mutexes[mutex];
    if (m.owner != current) return;  // its lock was left out
    m.owner = -1;
    m.carried = self().knows;
    m.step = static_cast<int>(events.size()) - 1;
}

// Sleeps; whether it was woken, and not ended early.
bool asleep(const void* on, bool timed, int64_t deadline) {
    Thread& thread = self();
    thread.state = Thread::kAsleep;
    thread.waits_on = on;
    thread.timed = timed, thread.timed_out = false;
    thread.deadline = deadline;
    {
        Inside in;
        to_scheduler();
    }
    return !thread.timed_out;
}

void wake_all(const void* on) {
    for (int t = 0; t < thread_count; t++)
        if (threads[t].state == Thread::kAsleep && threads[t].waits_on == on) {
            threads[t].state = Thread::kReady;
            threads[t].next = {kResume, nullptr};
        }
}

bool cond_wait(const void* cond, const void* mutex, const void* site, bool timed, int64_t deadline) {
    announce({kCondWait, cond, 0, site});
    unlock(mutex);
    const bool woken = asleep(cond, timed, deadline);
    lock(mutex, nullptr);
    return woken;
}

void notify(const void* cond, const void* site) {
    if (!modelled()) return;
    if (left_out(site)) return;
    announce({kNotify, cond, 0, site});
    Inside in;
    wake_all(cond);
}

void entry() {
    inside--;  // of the scheduler, which began this thread
    Thread& thread = self();
    try {
        thread.start(thread.argument);
    } catch (const std::exception& error) {
        fail("thread %d ended by an exception: %s", current, error.what());
    } catch (...) {
        fail("thread %d ended by an exception", current);
    }
    inside++;
    thread.state = Thread::kEnded;
    siglongjmp(scheduler, 1);
}

int spawn(void* (*start)(void*), void* argument) {
    if (thread_count == kThreads) fail("too many threads");
    Thread& thread = threads[thread_count];
    thread.number = thread_count;
    thread.state = Thread::kReady;
    thread.next = {kBegin, nullptr};
    thread.waits_on = nullptr;
    thread.timed = thread.timed_out = thread.detached = thread.begun = false;
    thread.now = thread.deadline = 0;
    thread.knows = current >= 0 ? self().knows : Knowledge{};
    thread.knows.clock[thread_count] = 1;
    thread.last_step = current >= 0 ? static_cast<int>(events.size()) - 1 : -1;
    if (current >= 0) self().knows.clock[current]++;
    thread.start = start, thread.argument = argument;
    memset(thread.exceptions, 0, sizeof thread.exceptions);
    sleeping[thread_count] = {};
    return thread_count++;
}

// ---- the scheduler ----

void clear() {
    for (const auto& [from, to] : dirty) memset(static_cast<void*>(cells + from), 0, (to - from) * sizeof(Cell));
    dirty.clear();
    heap_used = 0;
    thread_count = 0, current = -1;
    number_of.clear(), locations.clear(), mutexes.clear(), events.clear(), sizes.clear();
    for (Sleep& s : sleeping) s = {};
    why.clear();
    failed = false;
    ended_so = -1;
    depth = 0;
}

void resume(int thread) {
    current = thread;
    Thread& t = threads[thread];
    swap_exceptions(t, true);
    if (t.begun) _longjmp(t.at, 1);
    t.begun = true;
    getcontext(&t.begin);
    t.begin.uc_stack.ss_sp = region + kHeap + thread * kStack;
    t.begin.uc_stack.ss_size = kStack;
    t.begin.uc_link = nullptr;
    makecontext(&t.begin, entry, 0);
    setcontext(&t.begin);
}

void (*body)();
void* run_body(void*) {
    body();
    return nullptr;
}

// Runs one execution. Returns whether it is one: not cut short because others cover it.
bool execute(const Scenario& scenario) {
    clear();
    body = scenario.body;
    timeouts_left = scenario.timeouts;
    char outer[16];
    memcpy(outer, abi::__cxa_get_globals(), sizeof outer);
    inside = 1;
    spawn(run_body, nullptr);
    active = true;
    volatile bool whole = true;
    const int back = sigsetjmp(scheduler, 0);
    inside = 1;
    if (back == 3) whole = false;
    if (back < 2) {
        bool blocked;
        const int thread = pick(blocked);
        if (thread >= 0) {
            Thread& t = threads[thread];
            Op op = next_of(t);
            if (op.kind == kTimeout) {
                timeouts_left--;
                t.state = Thread::kReady, t.timed_out = true;
                t.now = std::max(t.now, t.deadline);
            }
            const size_t node = depth++;
            record(thread, op, static_cast<int>(node));
            t.knows.clock[thread]++;
            already = path[node].sleep[thread];
            put_to_sleep(path[node], op, thread);
            if (op.kind == kJoin) {
                const Thread* other = static_cast<const Thread*>(op.on);
                t.knows.join(other->knows);
                follow(other->last_step);
            }
            resume(thread);
        }
        if (blocked) {
            int waiting = 0;
            for (int i = 0; i < thread_count; i++)
                waiting += threads[i].state != Thread::kEnded && !threads[i].detached;
            if (waiting) {
                failed = true;
                why = "threads wait for ever:";
                for (int i = 0; i < thread_count; i++)
                    if (threads[i].state != Thread::kEnded) why += " " + std::to_string(i);
            }
        } else {
            cut++;
            whole = false;
        }
    }
    active = false;
    memcpy(abi::__cxa_get_globals(), outer, sizeof outer);
    inside = 0;
    return whole || failed;
}

void crashed(int signal) {
    inside++;
    if (!active) _exit(3);
    why = "it crashed: signal " + std::to_string(signal);
    failed = true;
    siglongjmp(scheduler, 2);
}

void print_trace() {
    for (const Event& e : events)
        std::printf("    thread %d: %s %p order %d value %llu at %p\n", e.thread, kNames[e.op.kind], e.op.on,
                    e.op.order, static_cast<unsigned long long>(e.value), e.op.site);
}

void prepare() {
    if (region) return;
    std::setvbuf(stdout, nullptr, _IOLBF, 1 << 12);
    __libc_single_threaded = 0;  // or reference counts would not be atomic
    region = static_cast<char*>(mmap(nullptr, kRegion, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    cells = static_cast<Cell*>(
        mmap(nullptr, kRegion * sizeof(Cell), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    static char alternate[1 << 16];
    const stack_t stack{alternate, 0, sizeof alternate};
    sigaltstack(&stack, nullptr);
    struct sigaction action{};
    action.sa_handler = crashed;
    action.sa_flags = SA_ONSTACK | SA_NODEFER;
    for (int signal : {SIGSEGV, SIGBUS, SIGABRT, SIGFPE, SIGILL}) sigaction(signal, &action, nullptr);
}

enum Result { kAll, kFailed, kMost };

Result search(const Scenario& scenario, long most, bool show) {
    path.clear();
    executions = cut = 0;
    outcomes.clear();
    for (;;) {
        if (execute(scenario)) executions++, ended_so < 0 ? 0 : outcomes[ended_so]++;
        if (failed) {
            if (show) {
                std::printf("%s: execution %ld fails: %s\n", scenario.name, executions, why.c_str());
                print_trace();
            }
            return kFailed;
        }
        if (!advance()) return kAll;
        if (executions + cut >= most) return kMost;
    }
}

}  // namespace

void demand(bool holds, const char* rule) {
    if (!holds && modelled()) fail("broken: %s", rule);
}

int choose(int ways) {
    if (!modelled()) return 0;
    Inside in;
    return way(ways);
}

void settle() {
    if (modelled()) announce({kSettle});
}

void outcome(int number) { ended_so = number; }

void futex_wait(void* word, unsigned seen, const void* limit) {
    const void* site = __builtin_return_address(0);
    if (!modelled()) return;
    bool sleeps;
    {
        Access access(kFutexWait, static_cast<unsigned*>(word), 4, kRelaxed, site);
        Store* from;
        sleeps = load_from(*access.location, access.number, access.op, access.location->woken, from) == seen;
        events.back().value = sleeps;
    }
    if (!sleeps) return;
    int64_t deadline = 0;
    if (limit) {
        const auto* time = static_cast<const timespec*>(limit);
        deadline = self().now + time->tv_sec * 1000000000 + time->tv_nsec;
    }
    asleep(word, limit, deadline);
}

void futex_wake(void* word) {
    const void* site = __builtin_return_address(0);
    if (!modelled() || left_out(site)) return;
    announce({kFutexWake, word, 0, site});
    Inside in;
    const int number = location_of(word, content(word, 4));
    locations[number].woken = std::max(locations[number].woken, self().knows.view[number]);
    wake_all(word);
}

bool reduction_is_right(const Scenario& scenario) {
    prepare();
    std::set<int> found[2];
    for (bool all : {false, true}) {
        naive = all;
        if (search(scenario, 3000000, true) != kAll) return false;
        for (const auto& one : outcomes) found[all].insert(one.first);
    }
    naive = false;
    return found[0] == found[1];
}

int explore(int count, char** arguments, std::initializer_list<Scenario> scenarios) {
    bool list = false, large = false;
    std::set<const void*> weakened;
    long most = 2000000;
    std::string only;
    for (int i = 1; i < count; i++) {
        const std::string argument = arguments[i];
        if (argument == "--sites") list = true;
        if (argument == "--weaken")
            weakened.insert(reinterpret_cast<const void*>(std::stoull(arguments[++i], nullptr, 16)));
        if (argument == "--large") large = true;
        if (argument == "--naive") naive = true;
        if (argument == "--most") most = std::atol(arguments[++i]);
        if (argument == "--only") only = arguments[++i];
    }
    prepare();
    for (const Scenario& scenario : scenarios) {
        if (only.empty() ? scenario.large && !large : only != scenario.name) continue;
        if (!weakened.empty()) continue;
        const Result result = search(scenario, most, true);
        if (result == kFailed) return 1;
        std::printf("%s: %ld executions, %ld cut short%s", scenario.name, executions, cut,
                    result == kMost ? ", not all" : "");
        for (const auto& [number, times] : outcomes) std::printf(" | %d: %ld", number, times);
        std::printf("\n");
    }
    if (list)
        for (const auto& [site, of] : sites)
            if (site) std::printf("site %p %s %s\n", site, kNames[of.kind], kOrders[of.order]);
    if (!weakened.empty()) search(*scenarios.begin(), 100, false);  // finds out what stands at these sites
    const auto attempt = [&](const void* site, const Site& of, int order) {
        mutation = {site, order, order < 0};
        std::printf("mutant %p %s %s: ", site, kNames[of.kind],
                    order < 0 ? "left out" : (std::string(kOrders[of.order]) + " -> " + kOrders[order]).c_str());
        for (const Scenario& scenario : scenarios) {
            if ((scenario.large && !large) || (!only.empty() && only != scenario.name)) continue;
            if (search(scenario, most, false) != kFailed) continue;
            std::printf("caught by %s after %ld: %s\n", scenario.name, executions, why.c_str());
            return;
        }
        std::printf("not caught\n");
    };
    for (const void* site : weakened) {
        for (const Scenario& scenario : scenarios)
            if (!sites.count(site)) search(scenario, most, false);
        const Site of = sites.at(site);
        const auto stronger = [&](int order) {  // than `order`
            return of.order != order && (of.order == kSeqCst || order == kRelaxed || of.order == kAcqRel);
        };
        if (of.kind <= kRmw)
            for (int order : {kRelaxed, kAcquire, kRelease, kAcqRel}) {
                const bool fits = of.kind == kLoad    ? order <= kAcquire
                                  : of.kind == kStore ? order == kRelaxed || order == kRelease
                                                      : true;
                if (fits && stronger(order)) attempt(site, of, order);
            }
        else if (of.kind == kLock || of.kind == kNotify || of.kind == kFutexWake)
            attempt(site, of, -1);
        mutation = {};
    }
    return 0;
}

}  // namespace machine

// ---- in place of ThreadSanitizer's library ----

using namespace machine;

#define SITE __builtin_return_address(0)
#define PLAIN(name, bytes, write)                              \
    extern "C" void __tsan_##name(void* at) {                  \
        if (!modelled()) return;                               \
        Inside in;                                             \
        touch(at, bytes, write, write ? "a write" : "a read"); \
    }
PLAIN(read1, 1, false)
PLAIN(read2, 2, false)
PLAIN(read4, 4, false)
PLAIN(read8, 8, false)
PLAIN(read16, 16, false)
PLAIN(write1, 1, true)
PLAIN(write2, 2, true)
PLAIN(write4, 4, true)
PLAIN(write8, 8, true)
PLAIN(write16, 16, true)
PLAIN(unaligned_read2, 2, false)
PLAIN(unaligned_read4, 4, false)
PLAIN(unaligned_read8, 8, false)
PLAIN(unaligned_read16, 16, false)
PLAIN(unaligned_write2, 2, true)
PLAIN(unaligned_write4, 4, true)
PLAIN(unaligned_write8, 8, true)
PLAIN(unaligned_write16, 16, true)
PLAIN(vptr_read, 8, false)

extern "C" {
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void** at, void*) {
    if (!modelled()) return;
    Inside in;
    touch(at, 8, true, "a write");
}
void __tsan_read_range(void* at, unsigned long bytes) {
    if (!modelled()) return;
    Inside in;
    touch(at, bytes, false, "a read");
}
void __tsan_write_range(void* at, unsigned long bytes) {
    if (!modelled()) return;
    Inside in;
    touch(at, bytes, true, "a write");
}
}

#define ATOMICS(bits, T)                                                                                          \
    extern "C" T __tsan_atomic##bits##_load(const volatile T* at, int order) { return load<T>(at, order, SITE); } \
    extern "C" void __tsan_atomic##bits##_store(volatile T* at, T value, int order) {                             \
        store<T>(at, value, order, SITE);                                                                         \
    }                                                                                                             \
    extern "C" T __tsan_atomic##bits##_exchange(volatile T* at, T value, int order) {                             \
        return change<T>(at, order, SITE, [&](T) { return value; });                                              \
    }                                                                                                             \
    extern "C" T __tsan_atomic##bits##_fetch_add(volatile T* at, T value, int order) {                            \
        return change<T>(at, order, SITE, [&](T old) { return static_cast<T>(old + value); });                    \
    }                                                                                                             \
    extern "C" T __tsan_atomic##bits##_fetch_sub(volatile T* at, T value, int order) {                            \
        return change<T>(at, order, SITE, [&](T old) { return static_cast<T>(old - value); });                    \
    }                                                                                                             \
    extern "C" T __tsan_atomic##bits##_fetch_or(volatile T* at, T value, int order) {                             \
        return change<T>(at, order, SITE, [&](T old) { return static_cast<T>(old | value); });                    \
    }
ATOMICS(8, uint8_t)
ATOMICS(32, uint32_t)
ATOMICS(64, uint64_t)

// ---- in place of glibc's and libstdc++'s functions ----

namespace {
void* allocate(size_t bytes, size_t alignment) {
    if (!modelled()) {
        void* at = alignment > 16 ? std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment)
                                  : std::malloc(bytes ? bytes : 1);
        if (!at) throw std::bad_alloc();
        return at;
    }
    Inside in;
    size_t start = (heap_used + alignment - 1) / alignment * alignment;
    heap_used = start + std::max<size_t>(bytes, 1) + 16;
    if (heap_used > kHeap) machine::fail("no memory is left");
    sizes[region + start] = bytes;
    memset(region + start, 0xAB, bytes);
    return region + start;
}
void release(void* at) {
    if (at < region || at >= region + kRegion) {
        std::free(at);
        return;
    }
    if (!modelled()) return;
    Inside in;
    const size_t bytes = sizes.at(at), first = static_cast<char*>(at) - region;
    touch(at, bytes, true, "freeing");
    for (size_t i = first; i < first + bytes; i++) cells[i].freed = 1;
}
}  // namespace

void* operator new(size_t bytes) { return allocate(bytes, 16); }
void* operator new[](size_t bytes) { return allocate(bytes, 16); }
void* operator new(size_t bytes, std::align_val_t alignment) { return allocate(bytes, static_cast<size_t>(alignment)); }
void operator delete(void* at) noexcept { release(at); }
void operator delete[](void* at) noexcept { release(at); }
void operator delete(void* at, size_t) noexcept { release(at); }
void operator delete[](void* at, size_t) noexcept { release(at); }
void operator delete(void* at, std::align_val_t) noexcept { release(at); }
void operator delete(void* at, size_t, std::align_val_t) noexcept { release(at); }

extern "C" {
int pthread_create(pthread_t* thread, const pthread_attr_t*, void* (*start)(void*), void* argument) {
    Inside in;
    *thread = static_cast<pthread_t>(spawn(start, argument) + 1);
    return 0;
}
int pthread_join(pthread_t thread, void**) {
    announce({kJoin, &threads[thread - 1], 0, nullptr});
    return 0;
}
int pthread_detach(pthread_t thread) {
    threads[thread - 1].detached = true;
    return 0;
}
int pthread_mutex_lock(pthread_mutex_t* mutex) {
    lock(mutex, SITE);
    return 0;
}
int pthread_mutex_unlock(pthread_mutex_t* mutex) {
    unlock(mutex);
    return 0;
}
int pthread_cond_clockwait(pthread_cond_t* cond, pthread_mutex_t* mutex, clockid_t, const timespec* until) {
    const int64_t deadline = until->tv_sec * 1000000000 + until->tv_nsec;
    return cond_wait(cond, mutex, SITE, true, deadline) ? 0 : ETIMEDOUT;
}
}

// The compiler leaves these to the sanitizer's library as well.
extern "C" void* memcpy(void* to, const void* from, size_t bytes) {
    if (modelled()) {
        Inside in;
        touch(from, bytes, false, "a read");
        touch(to, bytes, true, "a write");
    }
    return memmove(to, from, bytes);
}
extern "C" __attribute__((optimize("no-tree-loop-distribute-patterns"))) void* memset(void* to, int value,
                                                                                      size_t bytes) {
    if (modelled()) {
        Inside in;
        touch(to, bytes, true, "a write");
    }
    for (size_t i = 0; i < bytes; i++) static_cast<char*>(to)[i] = static_cast<char>(value);
    return to;
}

void std::condition_variable::wait(std::unique_lock<std::mutex>& lock) {
    cond_wait(native_handle(), lock.mutex()->native_handle(), SITE, false, 0);
}
void std::condition_variable::notify_all() noexcept { notify(native_handle(), SITE); }

bool std::__atomic_futex_unsigned_base::_M_futex_wait_until(unsigned* word, unsigned seen, bool, chrono::seconds,
                                                            chrono::nanoseconds) {
    machine::futex_wait(word, seen, nullptr);
    return true;
}
void std::__atomic_futex_unsigned_base::_M_futex_notify_all(unsigned* word) { machine::futex_wake(word); }

std::chrono::steady_clock::time_point std::chrono::steady_clock::now() noexcept {
    const int64_t now = active && current >= 0 ? threads[current].now : 0;
    return time_point(nanoseconds(now));
}
