# Writes ${MADE} from page_kernels.cpp.in: the files ${SOURCE}, ${HEADER} and, if there is one, ${IMAGE}, as lists of
# bytes. Run by page_kernels.cmake.
foreach(name SOURCE HEADER IMAGE)
  set(bytes "")
  if(${name})
    file(READ ${${name}} hex HEX)
    string(REGEX REPLACE "([0-9a-f][0-9a-f])" "0x\\1," bytes "${hex}")
  endif()
  set(${name} "${bytes}")
endforeach()
configure_file(${CMAKE_CURRENT_LIST_DIR}/page_kernels.cpp.in ${MADE} @ONLY)
