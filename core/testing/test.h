// The whole test harness. A file of tests is one executable, linked with test_main.cc:
//   TEST(adds_up) { CHECK_EQ(1 + 1, 2); CHECK_THROWS(parse(""), "must not be empty"); }
// A failed check ends its test by an exception, so it also works inside an Executor's task.
#pragma once
#include <sstream>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>

namespace cpumoe::testing {

struct Failure {
  std::string text;
};
struct Skip {
  std::string reason;
};

struct Registration {
  Registration(const char* name, void (*run)());
};

template <class T>
concept Streamable = requires(std::ostringstream& s, const T& v) { s << v; };

template <class T>
std::string show(const T& v) {
  std::ostringstream s;
  s.precision(9);
  if constexpr (std::is_same_v<T, bool>) {
    s << (v ? "true" : "false");
  } else if constexpr (std::is_integral_v<T> && sizeof(T) == 1 && !std::is_same_v<T, char>) {
    s << int(v);
  } else if constexpr (std::is_enum_v<T>) {
    s << +std::underlying_type_t<T>(v);
  } else if constexpr (Streamable<T>) {
    s << v;
  } else {
    s << "(" << sizeof(T) << " bytes)";
  }
  return s.str();
}

template <class T>
inline constexpr bool kPlainInteger =
    std::is_integral_v<T> && !std::is_same_v<T, bool> && !std::is_same_v<T, char>;

// Compares integers by value, whatever their signs.
#define CPUMOE_COMPARISON(name, op, integer)                             \
  struct name {                                                          \
    static constexpr const char* kText = #op;                            \
    template <class A, class B>                                          \
    static bool holds(const A& a, const B& b) {                          \
      if constexpr (kPlainInteger<A> && kPlainInteger<B>) {              \
        return std::integer(a, b);                                       \
      } else {                                                           \
        return a op b;                                                   \
      }                                                                  \
    }                                                                    \
  };
CPUMOE_COMPARISON(Eq, ==, cmp_equal)
CPUMOE_COMPARISON(Ne, !=, cmp_not_equal)
CPUMOE_COMPARISON(Lt, <, cmp_less)
CPUMOE_COMPARISON(Le, <=, cmp_less_equal)
CPUMOE_COMPARISON(Gt, >, cmp_greater)
CPUMOE_COMPARISON(Ge, >=, cmp_greater_equal)
#undef CPUMOE_COMPARISON

[[noreturn]] void fail(const char* file, int line, const std::string& text);

template <class Op, class A, class B>
void check_compare(const char* file, int line, const char* text, const A& a, const B& b) {
  if (!Op::holds(a, b))
    fail(file, line, std::string(text) + "; got " + show(a) + " and " + show(b));
}

template <class F>
void check_throws(const char* file, int line, const char* text, const std::string& part, F&& f) {
  try {
    f();
  } catch (const std::exception& e) {
    const std::string what = e.what();
    if (what.find(part) == std::string::npos) {
      fail(file, line, std::string(text) + " threw \"" + what + "\", which lacks \"" + part + "\"");
    }
    return;
  }
  fail(file, line, std::string(text) + " threw nothing");
}

}  // namespace cpumoe::testing

#define TEST(name)                                                                    \
  static void test_##name();                                                          \
  static const ::cpumoe::testing::Registration registration_##name(#name, test_##name); \
  static void test_##name()

#define CHECK(condition)                                                                    \
  do {                                                                                      \
    if (!(condition)) ::cpumoe::testing::fail(__FILE__, __LINE__, "CHECK(" #condition ")"); \
  } while (0)
// CHECK_MSG(ok, "k=" << k << " error=" << error)
#define CHECK_MSG(condition, stream)                                                     \
  do {                                                                                   \
    if (!(condition)) {                                                                  \
      std::ostringstream check_msg;                                                      \
      check_msg << "CHECK(" #condition "): " << stream;                                  \
      ::cpumoe::testing::fail(__FILE__, __LINE__, check_msg.str());                      \
    }                                                                                    \
  } while (0)
#define CPUMOE_CHECK_COMPARE(Op, op, a, b)                                                  \
  ::cpumoe::testing::check_compare<::cpumoe::testing::Op>(__FILE__, __LINE__, #a " " op " " #b, \
                                                          (a), (b))
#define CHECK_EQ(a, b) CPUMOE_CHECK_COMPARE(Eq, "==", a, b)
#define CHECK_NE(a, b) CPUMOE_CHECK_COMPARE(Ne, "!=", a, b)
#define CHECK_LT(a, b) CPUMOE_CHECK_COMPARE(Lt, "<", a, b)
#define CHECK_LE(a, b) CPUMOE_CHECK_COMPARE(Le, "<=", a, b)
#define CHECK_GT(a, b) CPUMOE_CHECK_COMPARE(Gt, ">", a, b)
#define CHECK_GE(a, b) CPUMOE_CHECK_COMPARE(Ge, ">=", a, b)
#define CHECK_THROWS(expression, part)                                       \
  ::cpumoe::testing::check_throws(__FILE__, __LINE__, #expression, (part), \
                                  [&] { static_cast<void>(expression); })
#define SKIP(why) throw ::cpumoe::testing::Skip{why}
