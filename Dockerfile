# CPU programs. Runs the commands of "Install by hand" in README.md.
#
#   docker build -t sdp4bit .
#   docker run -it sdp4bit              # a shell in which the README's recipes for CPUs work
FROM debian:12
RUN apt-get update
RUN apt-get install --yes gcc libc6-dev make pkg-config python3 openmpi-bin libopenmpi-dev \
        libopenblas-dev libcjson-dev libxxhash-dev libpcre2-dev libutf8proc-dev liburing-dev libzmq3-dev
COPY . /sdp4bit.c
WORKDIR /sdp4bit.c
RUN make
ENV OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
CMD ["bash"]
