# Writes ${MADE}: the kernels' source and, if there is one, their image, as data. Run by page_kernels.cmake.
set(text "#include \"cuda/kernels.hpp\"\n\nnamespace kvtier::cuda {\nnamespace {\n\n")
foreach(name SOURCE HEADER IMAGE)
  set(bytes "")
  if(${name})
    file(READ ${${name}} hex HEX)
    string(REGEX REPLACE "([0-9a-f][0-9a-f])" "0x\\1," bytes "${hex}")
  endif()
  # An array of length 0 is no C++: there is always a zero behind, which is not counted.
  string(APPEND text "alignas(16) const unsigned char k${name}[] = {${bytes}0};\n")
endforeach()
string(APPEND text "
std::string_view text_of(const unsigned char* data, std::size_t bytes) {
  return {reinterpret_cast<const char*>(data), bytes};
}

}  // namespace

std::span<const std::byte> built_image() { return std::as_bytes(std::span(kIMAGE)).first(sizeof kIMAGE - 1); }
std::string_view built_for() { return \"${BUILT_FOR}\"; }
std::string_view kernel_source() { return text_of(kSOURCE, sizeof kSOURCE - 1); }
std::string_view kernel_header() { return text_of(kHEADER, sizeof kHEADER - 1); }

}  // namespace kvtier::cuda
")
file(WRITE ${MADE} "${text}")
