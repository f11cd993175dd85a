# The GPU's page kernels: their machine code where nvcc is found, and their source, for a compiler at run time, always.
# Nothing of CUDA is linked, so that the same build imports with and without a GPU, a driver or a toolkit.

set(KVTIER_CUDA_CODE "sm_80;sm_90;sm_100;compute_100" CACHE STRING "What nvcc compiles the page kernels for")

function(kvtier_page_kernels target)
  set(source ${CMAKE_CURRENT_SOURCE_DIR}/csrc/cuda/page_copy.cu)
  set(header ${CMAKE_CURRENT_SOURCE_DIR}/csrc/cuda/page_args.hpp)
  set(made ${CMAKE_CURRENT_BINARY_DIR}/page_kernels.cpp)
  set(image "")
  set(built_for "")
  if(NOT KVTIER_CUDA STREQUAL "OFF")
    find_program(KVTIER_NVCC nvcc PATHS $ENV{CUDA_HOME}/bin /usr/local/cuda/bin)
    if(KVTIER_NVCC)
      set(image ${CMAKE_CURRENT_BINARY_DIR}/page_copy.fatbin)
      list(JOIN KVTIER_CUDA_CODE " " built_for)
      set(targets "")
      foreach(code IN LISTS KVTIER_CUDA_CODE)
        string(REGEX REPLACE "^[a-z]+_" "" arch ${code})
        list(APPEND targets -gencode=arch=compute_${arch},code=${code})
      endforeach()
      add_custom_command(
        OUTPUT ${image} COMMAND ${KVTIER_NVCC} -std=c++17 -O3 -I ${CMAKE_CURRENT_SOURCE_DIR}/csrc -fatbin ${targets} -o ${image} ${source}
        DEPENDS ${source} ${header} COMMENT "Compiling the page kernels for ${built_for}" VERBATIM)
      message(STATUS "nvcc was found: the page kernels are compiled for ${built_for}")
    elseif(KVTIER_CUDA STREQUAL "ON")
      message(FATAL_ERROR "KVTIER_CUDA=ON: nvcc was not found; put it on the PATH, or use AUTO")
    else()
      message(STATUS "nvcc was not found: the page kernels are compiled when a GPU is first used")
    endif()
  endif()
  add_custom_command(
    OUTPUT ${made}
    COMMAND ${CMAKE_COMMAND} -DSOURCE=${source} -DHEADER=${header} -DIMAGE=${image} "-DBUILT_FOR=${built_for}"
            -DMADE=${made} -P ${CMAKE_CURRENT_SOURCE_DIR}/cmake/embed_kernels.cmake
    DEPENDS ${source} ${header} ${image} ${CMAKE_CURRENT_SOURCE_DIR}/cmake/embed_kernels.cmake
            ${CMAKE_CURRENT_SOURCE_DIR}/cmake/page_kernels.cpp.in VERBATIM)
  target_sources(${target} PRIVATE ${made})
  target_link_libraries(${target} PUBLIC ${CMAKE_DL_LIBS})
endfunction()
