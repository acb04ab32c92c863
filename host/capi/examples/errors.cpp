// Errors as data: mistakes that have no effect, ranks that call different things, a rank that dies, and an abort from
// another thread. In C++17, with objects that free themselves.
//
//   c++ -std=c++17 -pthread errors.cpp -o errors $(pkg-config --cflags --libs sumac)
//   sumac run -n 4 ./errors

#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <sumac.h>
#include <thread>
#include <vector>

namespace {

struct Free {
    void operator()(sumac_comm *comm) const { sumac_comm_free(comm); }
    void operator()(sumac_config *config) const { sumac_config_free(config); }
    void operator()(sumac_options *options) const { sumac_options_free(options); }
};
template <typename T> using Owned = std::unique_ptr<T, Free>;

// A failed call, as an exception.
class Error : public std::runtime_error {
  public:
    explicit Error(sumac_status code) : std::runtime_error(sumac_last_error()), code(code) {}
    const sumac_status code;
};

void check(sumac_status status) {
    if (status != SUMAC_OK) {
        throw Error(status);
    }
}

void require(bool is_so, const std::string &what) {
    if (!is_so) {
        throw std::logic_error(what + "; the last error: " + sumac_last_error());
    }
}

std::vector<std::uint32_t> named_ranks() {
    std::vector<std::uint32_t> ranks(sumac_last_error_ranks(nullptr, 0));
    sumac_last_error_ranks(ranks.data(), ranks.size());
    return ranks;
}

sumac_status sum(sumac_comm *comm, std::vector<float> &values, const sumac_options *options = nullptr) {
    return sumac_all_reduce(comm, values.data(), values.data(), values.size(), SUMAC_F32, SUMAC_SUM, options, nullptr);
}

// None of these reaches another rank, and the communicator goes on.
void make_mistakes(sumac_comm *comm) {
    std::vector<float> values(1000, 1);
    sumac_comm *made = comm;
    Owned<sumac_options> options([] {
        sumac_options *made = nullptr;
        check(sumac_options_new(&made));
        return made;
    }());
    check(sumac_options_set_algo(options.get(), "ring"));
    const auto refused = {
        sumac_barrier(nullptr, nullptr, nullptr),
        sumac_join(nullptr, nullptr),
        sumac_all_reduce(comm, nullptr, values.data(), 1000, SUMAC_F32, SUMAC_SUM, nullptr, nullptr),
        sumac_all_reduce(comm, values.data(), values.data() + 1, 999, SUMAC_F32, SUMAC_SUM, nullptr, nullptr),
        sumac_all_reduce(comm, values.data(), values.data(), 1000, 99, SUMAC_SUM, nullptr, nullptr),
        sumac_all_reduce(comm, values.data(), values.data(), 1000, SUMAC_F32, -1, nullptr, nullptr),
        sumac_all_reduce(comm, values.data(), values.data(), 1000, SUMAC_F32, SUMAC_BXOR, nullptr, nullptr),
        sumac_all_gather(comm, values.data(), values.data(), std::numeric_limits<std::uint64_t>::max(), SUMAC_F32,
                         nullptr, nullptr),
        sumac_broadcast(comm, values.data(), 1000, SUMAC_F32, 1000, nullptr, nullptr),
        sumac_options_set_algo(options.get(), "comet"),
        sumac_options_set_deadline(options.get(), -1),
        sumac_comm_split(comm, -2, 0, &made),
        sumac_memory_alloc(comm, std::numeric_limits<std::size_t>::max(), nullptr),
    };
    for (const auto status : refused) {
        require(status == SUMAC_ERROR_ARGUMENT && sumac_status_is_rejection(status), sumac_status_name(status));
    }
    require(made == nullptr, "what an error did not make is NULL");
    require(sumac_outcome_path(nullptr) == SUMAC_PATH_NONE, "a NULL outcome has no path");
    sumac_comm_free(nullptr);
    check(sum(comm, values, options.get()));
    require(values[999] == static_cast<float>(sumac_comm_size(comm)), "a sum");
}

// Rank 0 calls something else: all ranks get the same error, with both calls.
void call_different_things(sumac_comm *comm) {
    sumac_comm *taken = nullptr;
    check(sumac_comm_split(comm, 0, 0, &taken));
    const Owned<sumac_comm> other(taken);
    std::vector<float> values(1000, 1);
    const bool is_first = sumac_comm_rank(comm) == 0;
    const auto status = is_first ? sumac_barrier(other.get(), nullptr, nullptr) : sum(other.get(), values);
    require(status == SUMAC_ERROR_MISMATCH, "a mismatch");
    std::int32_t collectives[2], dtypes[2];
    std::uint64_t counts[2];
    for (std::size_t which = 0; which < 2; which++) {
        require(sumac_last_error_call(which, &collectives[which], &dtypes[which], nullptr, nullptr, &counts[which]),
                "both calls are known");
    }
    require(collectives[0] == SUMAC_ALL_REDUCE && dtypes[0] == SUMAC_F32 && counts[0] == 1000, "one call");
    require(collectives[1] == SUMAC_BARRIER && dtypes[1] == 0, "the other call");
    require(!sumac_last_error_call(2, nullptr, nullptr, nullptr, nullptr, nullptr), "there are two calls");
    require(sum(other.get(), values) == SUMAC_ERROR_ENDED, "the communicator has ended");
    require(sumac_last_error_cause() == SUMAC_ERROR_MISMATCH, "and the reason is known");
}

// The last rank gives up; the others go on without it.
void lose_a_rank(sumac_comm *comm) {
    sumac_comm *taken = nullptr;
    check(sumac_comm_split(comm, 0, 0, &taken));
    Owned<sumac_comm> group(taken);
    const auto last = sumac_comm_size(comm) - 1;
    std::vector<float> values(1000, 1);
    check(sum(group.get(), values));
    if (sumac_comm_rank(comm) == last) {
        return; // Freed without leaving: to the others this rank is lost.
    }
    const auto status = sum(group.get(), values);
    require(status == SUMAC_ERROR_RANKS_FAILED && named_ranks() == std::vector<std::uint32_t>{last}, "a lost rank");
    std::uint64_t operation = 0;
    require(sumac_last_error_operation(&operation) && operation > 0, "the first call that failed");
    sumac_comm *shrunk = nullptr;
    check(sumac_comm_shrink(group.get(), &shrunk));
    group.reset(shrunk);
    values.assign(1000, 1);
    check(sum(group.get(), values));
    require(values[0] == static_cast<float>(last), "a sum of the survivors");
    taken = group.release();
    check(sumac_comm_leave(&taken, -1));
    require(taken == nullptr, "leaving frees the communicator");
}

// A call that waits for the others is ended by another thread.
void abort_a_call(sumac_comm *comm) {
    sumac_comm *taken = nullptr;
    check(sumac_comm_split(comm, sumac_comm_rank(comm) < 2 ? 0 : SUMAC_NO_COLOR, 0, &taken));
    const Owned<sumac_comm> pair(taken);
    std::vector<float> values(1000, 1);
    if (sumac_comm_rank(comm) == 0) {
        auto status = SUMAC_OK;
        std::string text;
        std::thread blocked([&] {
            status = sum(pair.get(), values);
            text = sumac_last_error();
        });
        check(sumac_comm_abort(pair.get()));
        blocked.join();
        require(status == SUMAC_ERROR_CANCELLED && text.find("cancelled") != std::string::npos, text);
    }
    // Rank 1 has not called it yet, so it could not complete.
    check(sumac_barrier(comm, nullptr, nullptr));
    if (sumac_comm_rank(comm) == 1) {
        require(sum(pair.get(), values) == SUMAC_ERROR_RANKS_FAILED, "rank 0 is lost");
        require(named_ranks() == std::vector<std::uint32_t>{0}, "rank 0 is named");
    }
}

// Nothing listens there, and a setting has a typing error.
void fail_to_join() {
    sumac_config *made = nullptr;
    check(sumac_config_new("127.0.0.1:1", "job", 0, 2, &made));
    const Owned<sumac_config> config(made);
    require(sumac_config_set(config.get(), "ordre", "pairwise") == SUMAC_ERROR_SETTING, "a misspelled setting");
    require(std::string(sumac_last_error()).find("did you mean order") != std::string::npos, "a hint");
    check(sumac_config_set(config.get(), "order", "pairwise"));
    check(sumac_config_set(config.get(), "join_timeout", "5"));
    sumac_comm *comm = nullptr;
    require(sumac_join(config.get(), &comm) == SUMAC_ERROR_CONTROLLER && comm == nullptr, "no controller");
    require(std::string(sumac_last_error()).find("127.0.0.1:1") != std::string::npos, "its address");
}

} // namespace

int main() {
    try {
        sumac_comm *comm = nullptr;
        check(sumac_join(nullptr, &comm));
        require(sumac_comm_size(comm) >= 2, "at least 2 ranks");
        make_mistakes(comm);
        call_different_things(comm);
        lose_a_rank(comm);
        abort_a_call(comm);
        fail_to_join();
        const auto rank = sumac_comm_rank(comm);
        check(sumac_barrier(comm, nullptr, nullptr));
        check(sumac_comm_leave(&comm, -1));
        if (rank == 0) {
            std::cout << "all errors are as expected\n";
        }
        return EXIT_SUCCESS;
    } catch (const std::exception &error) {
        std::cerr << "Error: " << error.what() << '\n';
        return EXIT_FAILURE;
    }
}
