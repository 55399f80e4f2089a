#include "error.h"

#include <cstdarg>
#include <cstdio>
#include <vector>

static thread_local std::string g_last_error;

void dflash2_set_last_error(const std::string & message) {
    g_last_error = message;
}

const char * dflash2_last_error(void) {
    return g_last_error.c_str();
}

std::string dflash2_format(const char * format, ...) {
    va_list args;
    va_list args_copy;
    va_start(args, format);
    va_copy(args_copy, args);
    const int         size = vsnprintf(nullptr, 0, format, args);
    std::vector<char> buf(size > 0 ? size + 1 : 1);
    vsnprintf(buf.data(), buf.size(), format, args_copy);
    va_end(args_copy);
    va_end(args);
    return std::string(buf.data());
}
