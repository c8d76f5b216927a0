// Stress test of the guide worker, built with sanitizers. It needs no driver.
//
//   stress_guide SEED CASES   run the guide worker with random settings
//
// If a check fails, the program prints the failed expression and exits with status 1.
#include "guide_case.h"

int main(int count, char** arguments) {
  if (count != 3) {
    std::fprintf(stderr, "usage: stress_guide SEED CASES\n");
    return 2;
  }
  return stress::guide(static_cast<unsigned>(std::atoi(arguments[1])), std::atoi(arguments[2]));
}
