// Declarations only. Some of TensorFlow's installed headers include <farmhash.h>, which the wheel
// does not ship; nothing of ours calls it, so these never need a definition.
#pragma once
#include <cstddef>
#include <cstdint>
#include <utility>

namespace util {
using uint128_t = std::pair<uint64_t, uint64_t>;
inline uint64_t Uint128Low64(const uint128_t& value) { return value.first; }
inline uint64_t Uint128High64(const uint128_t& value) { return value.second; }
}  // namespace util

namespace farmhash {
uint32_t Fingerprint32(const char* data, size_t size);
uint64_t Fingerprint64(const char* data, size_t size);
util::uint128_t Fingerprint128(const char* data, size_t size);
}  // namespace farmhash

namespace util {
using namespace farmhash;
}
