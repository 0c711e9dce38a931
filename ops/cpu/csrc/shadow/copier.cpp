#include "shadow/copier.h"

#include <cstring>
#include <string>
#include <system_error>
#include <utility>

#include "shadow/shadow.h"

namespace umbra {

Copier::Copier(const std::vector<int>& cpus) {
    try {
        thread_ = std::thread([this, cpus] {
            if (!cpus.empty()) pin(cpus);
            work();
        });
    } catch (const std::system_error& error) {
        throw ShadowError(std::string("expert copies: their thread cannot be started: ") + error.what());
    }
}

Copier::~Copier() {
    stop();
    thread_.join();
}

uint64_t Copier::submit(void* to, const void* from, std::vector<Piece> pieces, std::atomic<int64_t>* arrived) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (stopped_) throw ShadowError("expert copies: the copier was stopped");
    queue_.push_back({to, from, std::move(pieces), arrived});
    changed_.notify_all();
    return ++submitted_;
}

bool Copier::done(uint64_t ticket) const {
    const bool ended = ended_;  // read before `finished_`, so that copies finished before the end count
    if (finished_.load(std::memory_order_acquire) >= ticket) return true;
    if (ended) throw ShadowError("expert copies: the copier was stopped before copy " + std::to_string(ticket));
    return false;
}

void Copier::wait(uint64_t ticket) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return done(ticket); });
}

void Copier::stop() {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopped_ = true;
    changed_.notify_all();
}

void Copier::work() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
        changed_.wait(lock, [&] { return stopped_ || !queue_.empty(); });
        if (stopped_) break;
        const Copy copy = std::move(queue_.front());
        queue_.pop_front();
        lock.unlock();
        for (const Piece& piece : copy.pieces)
            std::memcpy(static_cast<char*>(copy.to) + piece.to, static_cast<const char*>(copy.from) + piece.from,
                        static_cast<size_t>(piece.bytes));
        if (copy.arrived)
            copy.arrived->store(static_cast<int64_t>(reinterpret_cast<uintptr_t>(copy.to)), std::memory_order_release);
        lock.lock();
        finished_.fetch_add(1, std::memory_order_release);
        changed_.notify_all();
    }
    ended_ = true;
    changed_.notify_all();
}

}  // namespace umbra
