// Errors inside the library: thrown, and turned into a status and a message at the C boundary.

#pragma once

#include "dflash2.h"

#include <new>
#include <stdexcept>
#include <string>

struct dflash2_error : std::runtime_error {
    dflash2_error(dflash2_status code, const std::string & message) : std::runtime_error(message), status(code) {}

    dflash2_status status;
};

// printf-like, for messages
std::string dflash2_format(const char * format, ...) __attribute__((format(printf, 1, 2)));

void dflash2_set_last_error(const std::string & message);

// Runs f and returns what it returns, or the status of what it throws.
template <typename F> int32_t dflash2_guard(F && f) {
    try {
        dflash2_set_last_error("");
        return f();
    } catch (const dflash2_error & e) {
        dflash2_set_last_error(e.what());
        return e.status;
    } catch (const std::bad_alloc &) {
        dflash2_set_last_error("out of memory");
        return DFLASH2_ERROR_MEMORY;
    } catch (const std::exception & e) {
        dflash2_set_last_error(e.what());
        return DFLASH2_ERROR_COMPUTE;
    }
}
