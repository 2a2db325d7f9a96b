// usage: <test> [part of a test's name]
// Exit codes: 0 passed, 1 failed, 77 this CPU lacks the ISA that CPUMOE_ISA forces.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "machine/isa.h"
#include "testing/test.h"

namespace cpumoe::testing {
namespace {

struct Case {
  const char* name;
  void (*run)();
};
std::vector<Case>& cases() {
  static std::vector<Case> all;
  return all;
}

bool cpu_lacks_forced_isa() {
  const char* forced = std::getenv("CPUMOE_ISA");
  if (forced == nullptr) return false;
  for (int i = 0; i < kIsaCount; ++i) {
    if (std::strcmp(forced, isa_name(Isa(i))) == 0) return !probe_isa().has(Isa(i));
  }
  return false;  // an unknown name is the tests' to refuse
}

}  // namespace

Registration::Registration(const char* name, void (*run)()) { cases().push_back({name, run}); }

void fail(const char* file, int line, const std::string& text) {
  throw Failure{std::string(file) + ":" + std::to_string(line) + ": " + text};
}

}  // namespace cpumoe::testing

int main(int argc, char** argv) {
  using namespace cpumoe::testing;
  if (cpu_lacks_forced_isa()) {
    std::printf("skipped: this CPU lacks %s\n", std::getenv("CPUMOE_ISA"));
    return 77;
  }
  int passed = 0, failed = 0, skipped = 0;
  for (const Case& c : cases()) {
    if (argc > 1 && std::strstr(c.name, argv[1]) == nullptr) continue;
    try {
      c.run();
      ++passed;
    } catch (const Failure& f) {
      ++failed;
      std::printf("FAIL %s\n  %s\n", c.name, f.text.c_str());
    } catch (const Skip& s) {
      ++skipped;
      std::printf("SKIP %s: %s\n", c.name, s.reason.c_str());
    } catch (const std::exception& e) {
      ++failed;
      std::printf("FAIL %s\n  threw %s\n", c.name, e.what());
    }
    std::fflush(stdout);
  }
  std::printf("%d passed, %d failed, %d skipped\n", passed, failed, skipped);
  return failed > 0 || passed + skipped == 0 ? 1 : 0;
}
