// The functions of GE that are called although no graph is executed; tests/ascend/ge.py replaces the others in Python.
#include <memory>
#include <string>

#include "graph/ascend_string.h"

namespace ge {

AscendString::AscendString(const char* text) : name_(text ? std::make_shared<std::string>(text) : nullptr) {}
const char* AscendString::GetString() const { return name_ ? name_->c_str() : ""; }
bool AscendString::operator<(const AscendString& other) const { return std::string(GetString()) < other.GetString(); }
bool AscendString::operator==(const AscendString& other) const { return std::string(GetString()) == other.GetString(); }

__attribute__((visibility("default"))) std::string GEGetErrorMsg() { return "fake GE"; }
__attribute__((visibility("default"))) AscendString GEGetWarningMsgV2() { return AscendString(""); }

class __attribute__((visibility("default"))) OperatorFactory {
public:
    static bool IsExistOp(const char* type);
};
bool OperatorFactory::IsExistOp(const char*) { return false; }

}  // namespace ge
