# Adds our own code to a llama.cpp build without touching its files.
#
# Injected with -DCMAKE_PROJECT_llama.cpp_INCLUDE=<this file> (the project's name has a dot, and so has the
# variable), or included from the top CMakeLists.txt of a fork. Everything happens at the end of the top
# directory, when upstream's targets exist.

option(DFLASH2_BUILD_TESTS "dflash2: build the C++ tests" OFF)
option(DFLASH2_UNVERSIONED "dflash2: library names without version, one file each" OFF)
set(DFLASH2_BUILD_INFO "unknown" CACHE STRING "dflash2: <llama.cpp commit>+<hash of the patch stack>")

set(DFLASH2_ROOT "${CMAKE_CURRENT_LIST_DIR}/..")

# files that need llama.cpp's private headers and live inside libllama
function(dflash2_extend_llama)
    file(GLOB sources CONFIGURE_DEPENDS "${DFLASH2_ROOT}/src/llama/*.cpp")
    target_sources(llama PRIVATE ${sources})
    target_include_directories(llama PRIVATE "${DFLASH2_ROOT}/src" "${DFLASH2_ROOT}/src/llama")
    target_compile_definitions(llama PRIVATE DFLASH2)
    # upstream's models are a unity build, which ours must not be pulled into
    set_source_files_properties(${sources} TARGET_DIRECTORY llama PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
endfunction()

# kernels: inside ggml-cpu, with the flags for this CPU that upstream's get
function(dflash2_extend_ggml_cpu)
    if (NOT TARGET ggml-cpu)
        return() # several, one per kind of CPU: as upstream made them
    endif()
    file(GLOB sources CONFIGURE_DEPENDS "${DFLASH2_ROOT}/src/ggml-cpu/*.cpp")
    target_sources(ggml-cpu PRIVATE ${sources})
    target_include_directories(ggml-cpu PRIVATE "${DFLASH2_ROOT}/src/ggml-cpu")
    target_compile_definitions(ggml-cpu PRIVATE DFLASH2)
endfunction()

function(dflash2_add_library)
    file(GLOB sources CONFIGURE_DEPENDS "${DFLASH2_ROOT}/src/*.cpp")
    if (NOT sources)
        message(FATAL_ERROR "dflash2: no sources in ${DFLASH2_ROOT}/src")
    endif()
    add_library(dflash2 SHARED ${sources})
    target_compile_features(dflash2 PRIVATE cxx_std_17)
    set_target_properties(dflash2 PROPERTIES CXX_EXTENSIONS OFF CXX_VISIBILITY_PRESET hidden
                                             VISIBILITY_INLINES_HIDDEN ON)
    target_include_directories(dflash2 PUBLIC "${DFLASH2_ROOT}/src" PRIVATE "${CMAKE_CURRENT_SOURCE_DIR}/src")
    target_compile_definitions(dflash2 PRIVATE DFLASH2_BUILD "DFLASH2_BUILD_INFO=\"${DFLASH2_BUILD_INFO}\"")
    target_link_libraries(dflash2 PUBLIC llama ggml)
    if (NOT MSVC)
        target_compile_options(dflash2 PRIVATE -Wall -Wextra -Wpedantic -Wcast-qual -Wshadow)
    endif()
endfunction()

# every tests/test-*.cpp is one program that exits 0 when its claim holds; time-*.cpp measure
function(dflash2_add_tests)
    file(GLOB sources CONFIGURE_DEPENDS "${DFLASH2_ROOT}/tests/*.cpp")
    add_custom_target(dflash2-tests)
    foreach (source ${sources})
        get_filename_component(name "${source}" NAME_WE)
        # with the library's objects, because tests also look at what it does not export
        add_executable(${name} "${source}" $<TARGET_OBJECTS:dflash2>)
        target_compile_features(${name} PRIVATE cxx_std_17)
        target_link_libraries(${name} PRIVATE llama ggml)
        target_include_directories(${name} PRIVATE "${DFLASH2_ROOT}/src" "${CMAKE_CURRENT_SOURCE_DIR}/src")
        add_dependencies(dflash2-tests ${name})
    endforeach()
endfunction()

# One file per library: a versioned name with symlinks would be loaded twice once links are resolved.
function(dflash2_drop_versions)
    foreach (name llama ggml ggml-base ggml-cpu ggml-cuda ggml-metal ggml-vulkan ggml-blas ggml-rpc ggml-hip)
        if (TARGET ${name})
            set_property(TARGET ${name} PROPERTY VERSION)
            set_property(TARGET ${name} PROPERTY SOVERSION)
        endif()
    endforeach()
endfunction()

function(dflash2_inject)
    dflash2_extend_ggml_cpu()
    dflash2_extend_llama()
    dflash2_add_library()
    if (DFLASH2_BUILD_TESTS)
        dflash2_add_tests()
    endif()
    if (DFLASH2_UNVERSIONED)
        dflash2_drop_versions()
    endif()
endfunction()

cmake_language(DEFER CALL dflash2_inject)
