// The harness itself: a check that cannot fail would make every other test worthless.
#include <cstdint>
#include <stdexcept>

#include "testing/test.h"

namespace cpumoe::testing {
namespace {

template <class F>
bool fails(F&& f, const char* part) {
  try {
    f();
  } catch (const Failure& failure) {
    return failure.text.find(part) != std::string::npos;
  }
  return false;
}

void throw_text(const char* text) { throw std::runtime_error(text); }

TEST(checks_fail_when_they_should) {
  const size_t one = 1;
  const auto expect = [](bool ok) {
    if (!ok) throw std::logic_error("a check of the harness did not behave");
  };
  expect(fails([] { CHECK(1 > 2); }, "CHECK(1 > 2)"));
  expect(fails([&] { CHECK_EQ(one, -1); }, "got 1 and -1"));
  expect(fails([&] { CHECK_LT(one, -1); }, "one < -1"));
  expect(fails([&] { CHECK_NE(one, 1); }, "harness_test.cc:"));
  expect(fails([&] { CHECK_LE(2.0, 1.0); }, "got 2 and 1"));
  expect(fails([&] { CHECK_GT(1, 1); }, ">"));
  expect(fails([&] { CHECK_GE(uint8_t{3}, 4); }, "got 3 and 4"));
  expect(fails([&] { CHECK_MSG(false, "k=" << 7); }, "k=7"));
  expect(fails([&] { CHECK_THROWS(throw_text("other"), "this"); }, "which lacks \"this\""));
  expect(fails([&] { CHECK_THROWS(static_cast<void>(0), "x"); }, "threw nothing"));
}

TEST(checks_pass_when_they_should) {
  const size_t one = 1;
  CHECK(true);
  CHECK_EQ(one, 1);
  CHECK_GT(one, -1);
  CHECK_LE(1.0, 1.0);
  CHECK_THROWS(throw_text("this text"), "this");
}

}  // namespace
}  // namespace cpumoe::testing
