// A FileEngine that misbehaves on purpose, for tests: it sits in front of a real one and spoils chosen operations.
#pragma once

#include <memory>

#include "common/fault_plan.hpp"
#include "io/file_engine.hpp"

namespace kvtier {

std::unique_ptr<FileEngine> make_faulty_engine(std::unique_ptr<FileEngine> inner, std::shared_ptr<FaultPlan> plan);

}  // namespace kvtier
