-- Dissects Sumac's packets in Wireshark and tshark: every field of the header by its name in `sumac_hal::wire`.
--
--   tshark -X lua_script:sumac.lua -r capture.pcapng -V
--
-- For Wireshark, copy this file to the folder "Personal Lua Plugins" (Help, About Wireshark, Folders). Packets are
-- recognised by their magic number, on any UDP port, whether captured by `sumac device --pcap` or on an interface.
-- Filters: sumac.kind == 8 (Naks), sumac.group == 3, sumac.seq == 17.
--
-- A test in `hal` compares offsets and names with the wire format, and what tshark shows with what was written.

local KINDS = {
    [1] = "Data", [2] = "Ref", [3] = "Empty", [4] = "Result", [5] = "Done", [6] = "Probe", [7] = "Status", [8] = "Nak",
    [9] = "Late", [10] = "Cut", [11] = "Operation",
}
local REASONS = {
    [1] = "Missing", [2] = "Resend", [3] = "WrongEpoch", [4] = "UnknownGroup", [5] = "Mismatch", [6] = "PathLost",
    [7] = "Unsupported", [8] = "Stragglers", [9] = "Excluded", [10] = "UnknownOperation",
}
local COLLECTIVES = {
    [1] = "all_reduce", [2] = "reduce", [3] = "broadcast", [4] = "reduce_scatter", [5] = "all_gather", [6] = "barrier",
    [7] = "gather", [8] = "scatter", [9] = "all_to_all", [10] = "all_to_all_v",
}
local DTYPES = {
    [1] = "i8", [2] = "u8", [3] = "i16", [4] = "u16", [5] = "i32", [6] = "u32", [7] = "i64", [8] = "u64", [9] = "f16",
    [10] = "bf16", [11] = "f32", [12] = "f64", [13] = "f8e4m3", [14] = "f8e5m2",
}
local OPS = {
    [1] = "sum", [2] = "prod", [3] = "min", [4] = "max", [5] = "avg", [6] = "premul_sum", [7] = "band", [8] = "bor",
    [9] = "bxor", [10] = "land", [11] = "lor", [12] = "lxor", [13] = "minloc", [14] = "maxloc",
}
local FLAGS = {
    [1] = "PARTIAL", [2] = "WANT", [4] = "CONGESTED", [8] = "SHARED", [16] = "LIMITED", [32] = "CUTS", [128] = "SHORT",
}

local HEADER_LEN = 88
local SHORT_HEADER_LEN = 48
local SHORT = 128
local RESULT = 4
local MAGIC = 0xc5
local VERSION = 2

-- name, offset, length in bytes, title, base, names of values: the fields of every header
local FIELDS = {
    { "magic", 0, 1, "Magic", base.HEX },
    { "version", 1, 1, "Version", base.DEC },
    { "kind", 2, 1, "Kind", base.DEC, KINDS },
    { "flags", 3, 1, "Flags", base.HEX },
    { "group", 4, 4, "Group", base.DEC },
    { "epoch", 8, 4, "Epoch", base.HEX },
    { "signature", 12, 4, "Signature of the operation", base.HEX },
    { "seq", 16, 8, "Seq", base.DEC },
    { "key", 24, 8, "Key", base.HEX },
    { "child", 32, 1, "Child", base.DEC },
    { "attempt", 33, 1, "Attempt", base.DEC },
    { "lag", 34, 2, "Seq minus mark (short form)", base.DEC },
    { "slowest", 36, 2, "Slowest rank, plus one", base.DEC },
    { "late", 38, 2, "Lateness of the slowest (us): 11 bits, 5 bits of exponent", base.HEX },
}
-- Behind them: Data in the short form
local DATA_FIELDS = {
    { "token", 40, 4, "Token", base.HEX },
    { "crc", 44, 4, "CRC-32C", base.HEX },
}
-- Result in the short form
local RESULT_FIELDS = {
    { "window", 40, 2, "Window", base.DEC },
    { "view", 42, 1, "View", base.DEC },
    { "spare", 43, 1, "Spare", base.HEX },
    { "crc", 44, 4, "CRC-32C", base.HEX },
}
-- The full form
local FULL_FIELDS = {
    { "token", 40, 4, "Token", base.HEX },
    { "count", 44, 2, "Count of seqs", base.DEC },
    { "window", 46, 2, "Window", base.DEC },
    { "mark", 48, 8, "Mark (up: have, down: stable)", base.DEC },
    { "bits", 56, 8, "Bits", base.HEX_DEC },
    { "bits2", 64, 8, "Bits 2", base.HEX_DEC },
    { "root", 72, 4, "Root", base.DEC },
    { "collective", 76, 1, "Collective", base.DEC, COLLECTIVES },
    { "dtype", 77, 1, "Element type", base.DEC, DTYPES },
    { "op", 78, 1, "Operator", base.DEC, OPS },
    { "reason", 79, 1, "Nak reason", base.DEC, REASONS },
    { "view", 80, 2, "View", base.DEC },
    { "spare", 82, 2, "Spare", base.HEX },
    { "crc", 84, 4, "CRC-32C", base.HEX },
}

local sumac = Proto("sumac", "Sumac collective")

local constructors = {
    [1] = ProtoField.uint8, [2] = ProtoField.uint16, [4] = ProtoField.uint32, [8] = ProtoField.uint64,
}
-- Fields by name. One that is narrower in a short form is added with the same definition.
local fields, flags, all = {}, {}, {}
for _, list in ipairs({ FULL_FIELDS, FIELDS }) do
    for _, field in ipairs(list) do
        local name, _, len, title, radix, names = table.unpack(field, 1, 6)
        fields[name] = constructors[len]("sumac." .. name, title, radix, names)
        all[#all + 1] = fields[name]
    end
end
for bit, name in pairs(FLAGS) do
    flags[#flags + 1] = ProtoField.bool("sumac.flags." .. name:lower(), name, 8, nil, bit)
    all[#all + 1] = flags[#flags]
end
local payload = ProtoField.bytes("sumac.payload", "Payload")

all[#all + 1] = payload
sumac.fields = all

local function name_of(names, number)
    return names[number] or tostring(number)
end

-- Return the fields behind those of every header, and the length of the header.
local function form_of(buffer)
    if buffer(3, 1):le_uint() < SHORT then return FULL_FIELDS, HEADER_LEN end
    if buffer(2, 1):le_uint() == RESULT then return RESULT_FIELDS, SHORT_HEADER_LEN end
    return DATA_FIELDS, SHORT_HEADER_LEN
end

function sumac.dissector(buffer, pinfo, tree)
    local form, header_len = form_of(buffer)
    if buffer:len() < header_len then return 0 end
    local subtree = tree:add(sumac, buffer())
    for _, list in ipairs({ FIELDS, form }) do
        for _, field in ipairs(list) do
            local item = subtree:add_le(fields[field[1]], buffer(field[2], field[3]))
            if field[1] == "flags" then
                for _, flag in ipairs(flags) do item:add_le(flag, buffer(field[2], field[3])) end
            end
        end
    end
    if buffer:len() > header_len then subtree:add(payload, buffer(header_len)) end

    local info = name_of(KINDS, buffer(2, 1):le_uint())
    local reason = header_len == HEADER_LEN and buffer(79, 1):le_uint() or 0
    if reason ~= 0 then info = info .. "(" .. name_of(REASONS, reason) .. ")" end
    info = info .. " group=" .. buffer(4, 4):le_uint() .. " child=" .. buffer(32, 1):le_uint()
    info = info .. " seq=" .. tostring(buffer(16, 8):le_uint64())
    if header_len == HEADER_LEN then info = info .. " count=" .. buffer(44, 2):le_uint() end
    pinfo.cols.protocol = "Sumac"
    pinfo.cols.info = info
    subtree:append_text(", " .. info)
    return buffer:len()
end

sumac:register_heuristic("udp", function(buffer, pinfo, tree)
    if buffer:len() < SHORT_HEADER_LEN or buffer(0, 1):le_uint() ~= MAGIC or buffer(1, 1):le_uint() ~= VERSION then
        return false
    end
    if KINDS[buffer(2, 1):le_uint()] == nil then return false end
    return sumac.dissector(buffer, pinfo, tree) > 0
end)
